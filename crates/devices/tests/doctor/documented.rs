//! Tests named in the guide's table of what real GPUs do.

use std::fs;
use std::path::{Path, PathBuf};

fn sources(folder: &Path, text: &mut String) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, text);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            text.push_str(&fs::read_to_string(path).unwrap());
        }
    }
}

#[test]
fn every_test_named_in_the_guide_exists() {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    let guide = fs::read_to_string(root.join("docs/devices.md")).unwrap();
    let (_, table) = guide.split_once("## What real GPUs do").unwrap();
    let mut code = String::new();
    for part in ["crates/devices", "crates/core"] {
        sources(&root.join(part), &mut code);
    }
    let rows = table.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| |")).collect::<Vec<_>>();
    assert_eq!(rows.len(), 43);
    let mut named = 0;
    for row in rows {
        let tests = row.rsplit('|').nth(1).unwrap();
        for name in tests.split('`').skip(1).step_by(2) {
            // An ellipsis cuts off the rest of a name; a lone module is a file of tests.
            let name = name.rsplit("::").next().unwrap().trim_end_matches('…').trim_start_matches('…');
            let is_test = code.contains(&format!("fn {name}"));
            let is_module = code.contains(&format!("mod {name};"))
                || root.join(format!("crates/devices/tests/{name}.rs")).is_file();
            assert!(is_test || is_module, "there is no {name} for: {row}");
            named += 1;
        }
    }
    assert!(named > 50, "{named}");
}
