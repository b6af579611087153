//! The commands of the README work.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns the commands in the shell blocks of the README.
fn commands() -> Vec<String> {
    let readme = std::fs::read_to_string(root().join("README.md")).unwrap();
    let blocks = readme.split("```sh\n").skip(1).map(|rest| rest.split("```").next().unwrap());
    let lines = blocks.flat_map(str::lines).map(|line| line.split('#').next().unwrap().trim().to_owned());
    lines.filter(|line| !line.is_empty()).collect()
}

/// Agent started as in the README, but with its own state directory and port.
struct ReadmeAgent {
    child: Child,
    state: TempDir,
    address: String,
}

impl ReadmeAgent {
    fn start(arguments: &[&str]) -> Self {
        let state = tempfile::tempdir().unwrap();
        let mut program = program(arguments, state.path());
        let mut child = program.env("PORT", "0").stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut addresses = lines
            .map_while(Result::ok)
            .filter_map(|line| line.strip_prefix("gpupool is listening on http://").map(str::to_owned));
        let address = addresses.next().expect("the agent says where it listens");
        Self { child, state, address }
    }
}

impl Drop for ReadmeAgent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Prepares the program of the tests on a machine without GPUs.
fn program(arguments: &[&str], state: &Path) -> Command {
    let mut program = Command::new(env!("CARGO_BIN_EXE_gpupool"));
    program.args(arguments).current_dir(root()).env("GPUPOOL_STATE_DIR", state);
    // The result of doctor must not depend on this machine.
    for place in ["SYS", "PROC", "DEV", "ETC", "NVML", "NVIDIA_SMI", "AMD_SMI", "ROCM_SMI"] {
        program.env(format!("GPUPOOL_{place}"), state.join("nowhere").join(place));
    }
    program
}

#[test]
fn every_command_of_the_readme_runs() {
    let mut ran = 0;
    let mut agent = None;
    let elsewhere = tempfile::tempdir().unwrap();
    for command in commands() {
        let words: Vec<&str> = command.split_whitespace().collect();
        let mut program = match words.as_slice() {
            ["cargo", "run", "--release", "--", "serve", rest @ ..] => {
                let arguments: Vec<&str> = std::iter::once("serve").chain(rest.iter().copied()).collect();
                agent = Some(ReadmeAgent::start(&arguments));
                ran += 1;
                continue;
            }
            ["cargo", "run", "--release", "--", rest @ ..] => {
                program(rest, agent.as_ref().map_or(elsewhere.path(), |agent| agent.state.path()))
            }
            ["curl", rest @ ..] => {
                let address = &agent.as_ref().expect("an agent is started first").address;
                let mut curl = Command::new("curl");
                curl.arg("--fail").args(rest.iter().map(|word| word.replace("localhost:8000", address)));
                curl
            }
            // The scripts would run these tests again, so they only have to exist.
            [script, ..] => {
                assert!(root().join(script).is_file(), "{command}: there is no {script}");
                continue;
            }
            [] => continue,
        };
        let output = program.output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{command}: {error}");
        assert!(!output.stdout.is_empty(), "{command} prints nothing");
        ran += 1;
    }
    assert!(ran >= 2, "the README shows what gpupool does");
}

#[test]
fn the_readme_is_short() {
    let readme = std::fs::read_to_string(root().join("README.md")).unwrap();
    assert!(readme.lines().count() <= 120, "move the rest into docs");
}

#[test]
fn ci_runs_only_the_test_command_of_the_readme() {
    assert!(commands().contains(&"scripts/test".to_owned()));
    let ci = std::fs::read_to_string(root().join(".ci/run")).unwrap();
    assert_eq!(ci.lines().last(), Some("exec scripts/test"));
}
