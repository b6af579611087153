//! Every example file loads without findings. Files that an example names need not exist here.

use std::path::Path;

use super::{findings, from_file, loaded};

fn examples() -> Vec<(String, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/config");
    let files = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
    files
        .map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), std::fs::read_to_string(&path).unwrap()))
        .collect()
}

#[test]
fn every_example_loads_without_findings() {
    let mut names = Vec::new();
    for (name, text) in examples() {
        assert_eq!(findings(&from_file(&text)), [], "{name}");
        assert!(text.starts_with("# "), "{name} does not start with its purpose");
        names.push(name);
    }
    names.sort();
    assert_eq!(names, ["batch.toml", "development.toml", "edge.toml", "multi-tenant.toml", "production.toml"]);
}

#[test]
fn an_example_that_needs_files_says_so() {
    for (name, text) in examples() {
        let needs = loaded(&from_file(&text)).config.server.tls_cert.is_some();
        assert_eq!(needs, text.contains("# Needs: the two files named under tls_cert and tls_key."), "{name}");
    }
}
