//! The documentation is true where a program can tell: links and paths exist, commands run, code parses.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use gpupool_testkit::TestAgent;

/// Pages whose commands are run by this file, against a simulated agent of their own.
const RUN_HERE: &[&str] = &[
    "cli.md",
    "configuration.md",
    "devices.md",
    "limits.md",
    "map.md",
    "metrics.md",
    "operations.md",
    "pool.md",
    "python.md",
    "run.md",
    "statistics.md",
    "troubleshooting.md",
    "user-guide.md",
];
/// Pages whose commands other tests run.
const RUN_ELSEWHERE: &[&str] = &["README.md", "api.md", "tutorial.md", "worker-protocol.md"];
/// Pages whose commands build or test the project: scripts, packages and tests they name must exist.
const BUILDING: &[&str] = &["CONTRIBUTING.md", "benchmarks.md", "client.md", "dispatch.md", "testing.md"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn pages() -> Vec<PathBuf> {
    let mut pages: Vec<PathBuf> = Vec::new();
    for folder in ["", "docs", "docs/decisions", "deploy", "python", "fuzz", "examples/traces"] {
        let files = fs::read_dir(root().join(folder)).unwrap().map(|file| file.unwrap().path());
        pages.extend(files.filter(|path| path.extension().is_some_and(|extension| extension == "md")));
    }
    assert!(pages.len() > 40);
    pages.sort();
    pages
}

fn file_name(page: &Path) -> &str {
    page.file_name().unwrap().to_str().unwrap()
}

/// Code blocks with their languages.
fn blocks(text: &str) -> Vec<(String, String)> {
    let mut blocks = Vec::new();
    let mut open: Option<(String, String)> = None;
    for line in text.lines() {
        match (line.trim_start().strip_prefix("```"), &mut open) {
            (Some(language), None) => open = Some((language.to_owned(), String::new())),
            (Some(_), Some(_)) => blocks.extend(open.take()),
            (None, Some((_, code))) => *code += &format!("{line}\n"),
            (None, None) => {}
        }
    }
    blocks
}

/// The text without its code blocks.
fn prose(text: &str) -> String {
    let mut inside = false;
    let lines = text.lines().filter(|line| {
        let is_fence = line.trim_start().starts_with("```");
        inside ^= is_fence;
        !inside && !is_fence
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// The name that GitHub gives to a heading.
fn anchor(heading: &str) -> String {
    let kept = heading.to_lowercase().replace(' ', "-");
    kept.chars().filter(|c| c.is_alphanumeric() || matches!(c, '-' | '_')).collect()
}

fn anchors(page: &Path) -> Vec<String> {
    let text = prose(&fs::read_to_string(page).unwrap());
    let headings = text.lines().filter_map(|line| line.strip_prefix('#'));
    headings.map(|heading| anchor(heading.trim_start_matches('#').trim())).collect()
}

/// What stands between two marks, each time.
fn between<'a>(text: &'a str, start: &'a str, end: char) -> impl Iterator<Item = &'a str> {
    text.split(start).skip(1).filter_map(move |rest| rest.split(end).next())
}

#[test]
fn every_link_leads_somewhere() {
    let mut count = 0;
    for page in pages() {
        let text = prose(&fs::read_to_string(&page).unwrap());
        let links =
            between(&text, "](", ')').chain(between(&text, "src=\"", '"')).chain(between(&text, "srcset=\"", '"'));
        for link in links.filter(|link| !link.contains("://")) {
            let (path, fragment) = link.split_once('#').unwrap_or((link, ""));
            let target = if path.is_empty() { page.clone() } else { page.parent().unwrap().join(path) };
            assert!(target.exists(), "{}: {link} leads nowhere", page.display());
            if !fragment.is_empty() {
                let known = anchors(&target);
                assert!(known.iter().any(|name| name == fragment), "{}: {link}: only {known:?}", page.display());
            }
            count += 1;
        }
    }
    assert!(count > 200, "{count}");
}

#[test]
fn every_path_that_is_named_exists() {
    let folders = ["crates/", "docs/", "examples/", "tests/", "scripts/", "benches/", "deploy/", "python/", "fuzz/"];
    let mut count = 0;
    for page in pages().into_iter().filter(|page| file_name(page) != "CHANGELOG.md") {
        for code in prose(&fs::read_to_string(&page).unwrap()).split('`').skip(1).step_by(2) {
            let path = code.split(' ').next().unwrap();
            // A name that is to be filled in may be that of a file which a program will write.
            if path.contains('<') || !folders.iter().any(|folder| path.starts_with(folder)) {
                continue;
            }
            // A pattern stands for files of a folder that exists.
            let fixed = path.split(['*', '…', '{']).next().unwrap();
            let fixed = if fixed == path { fixed } else { fixed.rsplit_once('/').unwrap().0 };
            assert!(root().join(fixed).exists(), "{}: there is no {path}", page.display());
            count += 1;
        }
    }
    assert!(count > 100, "{count}");
}

#[test]
fn the_index_names_every_page() {
    let index = fs::read_to_string(root().join("docs/README.md")).unwrap();
    let decisions = fs::read_to_string(root().join("docs/decisions/README.md")).unwrap();
    for page in pages() {
        let (list, name) = match page.parent().unwrap() {
            folder if folder == root().join("docs") => (&index, file_name(&page)),
            folder if folder == root().join("docs/decisions") => (&decisions, file_name(&page)),
            _ => continue,
        };
        assert!(name == "README.md" || list.contains(&format!("]({name})")), "{name} is in no list");
    }
}

#[test]
fn every_code_block_is_checked_by_a_test() {
    for page in pages() {
        let name = file_name(&page);
        for (language, code) in blocks(&fs::read_to_string(&page).unwrap()) {
            match language.as_str() {
                "sh" | "console" => {
                    let lists = [RUN_HERE, RUN_ELSEWHERE, BUILDING];
                    assert!(lists.iter().any(|list| list.contains(&name)), "{name}: no test runs\n{code}");
                }
                "json" => drop(
                    serde_json::from_str::<serde_json::Value>(&code)
                        .unwrap_or_else(|error| panic!("{name}: {error}\n{code}")),
                ),
                "toml" => can_be_shown(name, &code),
                // python/tests/test_docs.py runs programs in Python, the documentation tests of the crates compile those in Rust.
                "python" | "rust,no_run" => {}
                // Output, configuration of other programs, drawings, and commands that change the machine.
                "text" | "yaml" | "ini" | "mermaid" => {}
                other => panic!("{name}: a code block of {other:?}:\n{code}"),
            }
        }
    }
}

/// The settings can be read, whether or not the files that they name exist.
fn can_be_shown(page: &str, settings: &str) {
    let place = tempfile::tempdir().unwrap();
    let file = place.path().join("gpupool.toml");
    fs::write(&file, settings).unwrap();
    let mut show = Command::new(env!("CARGO_BIN_EXE_gpupool"));
    let output = show.args(["config", "show"]).env("GPUPOOL_CONFIG", &file).output().unwrap();
    assert!(output.status.success(), "{page}: {}\n{settings}", String::from_utf8_lossy(&output.stderr));
}

/// Commands of a page: lines of shell blocks, and those behind a `$` in blocks that show output too.
fn commands(text: &str) -> Vec<String> {
    let lines = blocks(text).into_iter().flat_map(|(language, code)| {
        let lines = code.lines().map(str::to_owned).collect::<Vec<_>>();
        match language.as_str() {
            "sh" => lines,
            "console" => lines.iter().filter_map(|line| Some(line.strip_prefix("$ ")?.to_owned())).collect(),
            _ => Vec::new(),
        }
    });
    lines.filter(|line| !line.is_empty()).collect()
}

/// Stand-ins for the programs that the guides run on GPUs, and the files that they read.
fn workplace(place: &Path) {
    use std::os::unix::fs::PermissionsExt as _;
    let programs = place.join("programs");
    for folder in ["programs", "data", ".local/share/bash-completion/completions"] {
        fs::create_dir_all(place.join(folder)).unwrap();
    }
    // A worker that stays answers each line; everything else is done at once.
    let stand_in = "#!/bin/sh\ncase \"$*\" in *worker.py*) exec cat ;; esac\n";
    for path in ["python", "torchrun", "nvidia-smi", "gzip", "train", "../bench.sh"].map(|name| programs.join(name)) {
        fs::write(&path, stand_in).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    for file in ["data/a.wav", "data/b.wav", "a.png", "b.png", "a.log", "list.txt", "tasks"] {
        fs::write(place.join(file), "one\ntwo\n").unwrap();
    }
}

#[tokio::test]
async fn every_command_of_the_guides_runs() {
    let mut count = 0;
    for name in RUN_HERE {
        let commands = commands(&fs::read_to_string(root().join("docs").join(name)).unwrap());
        if commands.is_empty() {
            continue;
        }
        let place = tempfile::tempdir().unwrap();
        workplace(place.path());
        let agent = TestAgent::builder(env!("CARGO_BIN_EXE_gpupool")).simulate("8xH100").start().await;
        let mut script = String::from("set -e\n");
        // An agent runs already.
        for command in commands.iter().filter(|command| !command.starts_with("gpupool serve")) {
            script += &format!("{}\n", command.replace("localhost:8000", agent.address()));
            count += 1;
        }
        let programs = Path::new(env!("CARGO_BIN_EXE_gpupool")).parent().unwrap().display();
        let path = format!("{}:{programs}:{}", place.path().join("programs").display(), std::env::var("PATH").unwrap());
        let mut bash = Command::new("timeout");
        bash.args(["--kill-after=10", "120", "bash", "-xc", &script]).current_dir(place.path());
        bash.env("PATH", path).env("HOME", place.path()).env("PORT", "0");
        bash.env("GPU_SERVICE_ENDPOINT", format!("unix:{}", agent.socket().display()));
        // What the doctor finds must not depend on the machine.
        for variable in ["SYS", "PROC", "DEV", "ETC", "NVML", "NVIDIA_SMI", "AMD_SMI", "ROCM_SMI"] {
            bash.env(format!("GPUPOOL_{variable}"), place.path().join("nowhere").join(variable));
        }
        let output = bash.output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "docs/{name}: {error}\n{}", agent.log());
    }
    assert!(count > 40, "{count}");
}

#[test]
fn commands_that_build_and_test_name_what_exists() {
    let mut count = 0;
    for page in pages().into_iter().filter(|page| BUILDING.contains(&file_name(page))) {
        for command in commands(&fs::read_to_string(&page).unwrap()) {
            let words: Vec<&str> = command.split('#').next().unwrap().split_whitespace().collect();
            let program = *words.iter().find(|word| !word.contains('=')).unwrap();
            if program != "cargo" {
                assert!(root().join(program).is_file(), "{}: {command}", page.display());
            }
            for pair in words.windows(2) {
                let name = pair[1];
                match pair[0] {
                    "-p" => assert!(package(name).join("Cargo.toml").is_file(), "{}: {command}", page.display()),
                    "--test" => {
                        let crate_folder = package(words[words.iter().position(|word| *word == "-p").unwrap() + 1]);
                        let tests = crate_folder.join("tests");
                        let exists = tests.join(name).is_dir() || tests.join(format!("{name}.rs")).is_file();
                        assert!(exists, "{}: {command}", page.display());
                    }
                    _ => {}
                }
            }
            count += 1;
        }
    }
    assert!(count > 10, "{count}");
}

/// The folder of a package.
fn package(name: &str) -> PathBuf {
    let folder = if name == "gpupool" { "cli" } else { name.strip_prefix("gpupool-").unwrap_or(name) };
    root().join("crates").join(folder)
}
