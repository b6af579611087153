//! What the README tells people to type works.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The commands of the README's shell blocks.
fn commands() -> Vec<String> {
    let readme = std::fs::read_to_string(root().join("README.md")).unwrap();
    let blocks = readme.split("```sh\n").skip(1).map(|rest| rest.split("```").next().unwrap());
    let lines = blocks.flat_map(str::lines).map(|line| line.split('#').next().unwrap().trim().to_owned());
    lines.filter(|line| !line.is_empty()).collect()
}

#[test]
fn every_command_of_the_readme_runs() {
    let mut ran = 0;
    let nowhere = tempfile::tempdir().unwrap();
    for command in commands() {
        let arguments: Vec<&str> = match command.strip_prefix("cargo run --release -- ") {
            Some(rest) => rest.split_whitespace().collect(),
            None => {
                // Scripts would run these tests again: they must be there and be programs.
                let script = command.split_whitespace().next().unwrap();
                assert!(root().join(script).is_file(), "{command}: there is no {script}");
                continue;
            }
        };
        let mut program = Command::new(env!("CARGO_BIN_EXE_gpupool"));
        program.args(&arguments).current_dir(root());
        // What the doctor says must not depend on the machine the tests run on.
        for place in ["SYS", "PROC", "DEV", "ETC", "NVML", "NVIDIA_SMI", "AMD_SMI", "ROCM_SMI"] {
            program.env(format!("GPUPOOL_{place}"), nowhere.path().join(place));
        }
        let output = program.output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{command}: {error}");
        assert!(!output.stdout.is_empty(), "{command} says nothing");
        ran += 1;
    }
    assert!(ran >= 2, "the README shows what gpupool does");
}

#[test]
fn ci_runs_the_test_command_of_the_readme_and_nothing_else() {
    assert!(commands().contains(&"scripts/test".to_owned()));
    let ci = std::fs::read_to_string(root().join(".ci/run")).unwrap();
    assert_eq!(ci.lines().last(), Some("exec scripts/test"));
}
