//! `docs/configuration.md` agrees with the code.

use gpupool_config::{SECTIONS, Setting, all_settings};

const HEAD: &str = "| key | variable | flag | default | allowed | meaning |\n|---|---|---|---|---|---|\n";

fn tables() -> String {
    let mut text = String::new();
    for (section, about) in SECTIONS {
        text += &format!("### [{section}]\n\n{}\n\n{HEAD}", about.trim());
        for setting in all_settings().iter().filter(|setting| setting.section() == *section) {
            text += &row(setting);
        }
        text += "\n";
    }
    text
}

fn row(setting: &Setting) -> String {
    let code = |words: &str| if words.is_empty() { "–".to_owned() } else { format!("`{words}`") };
    let variables = setting.env.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", alias ");
    let default = match &setting.default {
        serde_json::Value::String(text) if text.is_empty() => "(empty)".to_owned(),
        serde_json::Value::String(text) => text.clone(),
        serde_json::Value::Null => String::new(),
        serde_json::Value::Array(_) => String::new(),
        other => other.to_string(),
    };
    format!(
        "| `{}` | {} | {} | {} | {} | {}{} |\n",
        setting.key,
        if variables.is_empty() { "–" } else { &variables },
        code(setting.flag.unwrap_or_default()),
        code(&default),
        setting.allowed,
        setting.meaning,
        if setting.live { " Taken on SIGHUP." } else { "" },
    )
}

#[test]
fn the_tables_of_the_documentation_are_those_of_the_code() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/configuration.md");
    let text = std::fs::read_to_string(&path).unwrap_or_default();
    let (begin, end) = ("<!-- settings begin -->\n", "<!-- settings end -->");
    let written = text.split_once(begin).and_then(|(_, rest)| rest.split_once(end)).map(|(tables, _)| tables.trim());
    let tables = tables();
    if std::env::var_os("GPUPOOL_WRITE_GOLDEN").is_some() {
        let (head, rest) = text.split_once(begin).unwrap();
        let (_, tail) = rest.split_once(end).unwrap();
        std::fs::write(&path, format!("{head}{begin}\n{tables}{end}{tail}")).unwrap();
        return;
    }
    assert!(
        written == Some(tables.trim()),
        "docs/configuration.md differs from the code; GPUPOOL_WRITE_GOLDEN=1 cargo test -p gpupool-config documentation\n\
         writes this between the two comments:\n\n{tables}"
    );
}

#[test]
fn the_documentation_lists_every_finding() {
    let here = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(here.join("../../docs/configuration.md")).unwrap();
    let mut codes = 0;
    for file in ["src/check.rs", "src/problem.rs"] {
        let source = std::fs::read_to_string(here.join(file)).unwrap();
        // In the source, each code is quoted after its severity.
        let behind = source
            .split(['(', '\n'])
            .filter_map(|part| part.trim().split_once(", \"").or(part.trim().split_once("code: \"")));
        for (_, rest) in behind.filter(|(before, _)| matches!(*before, "Error" | "Warning" | "Notice" | "")) {
            let code = rest.split('"').next().unwrap();
            assert!(text.contains(&format!("`{code}`")), "docs/configuration.md does not list {code}");
            codes += 1;
        }
    }
    assert!(codes > 20, "only {codes} codes were seen in the source");
}

#[test]
fn the_backends_are_those_the_devices_know() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../devices/src/detect.rs");
    let printed = format!("allowed are {}", gpupool_config::BACKENDS.join(", "));
    assert!(
        std::fs::read_to_string(path).unwrap().contains(&printed),
        "crates/devices/src/detect.rs no longer says {printed:?}"
    );
}
