//! The commands of docs/tutorial.md work from top to bottom in one shell.

use std::net::TcpListener;
use std::path::Path;
use std::process::Command;

/// Returns the shell blocks as a script that stops at the first line with another result than the page.
fn tutorial_script(port: u16) -> String {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/tutorial.md");
    let text = std::fs::read_to_string(page).unwrap();
    let blocks = text.split("```sh\n").skip(1).map(|rest| rest.split("```").next().unwrap());
    let mut script = String::from(
        "set -e\ntrap 'kill $(jobs -p) 2>/dev/null || true' EXIT\nuntil_true() { until \"$@\" >/dev/null 2>&1; do sleep 0.1; done; }\n",
    );
    for line in blocks.flat_map(str::lines) {
        // The tests have built the program already.
        if line.starts_with("cargo build") || line.starts_with("export PATH") {
            continue;
        }
        let line = line.replace("localhost:8000", &format!("localhost:{port}"));
        if let Some((command, _)) = line.split_once("# refused") {
            script += &format!("if {command}; then echo \"not refused: {}\" >&2; exit 1; fi\n", command.trim());
            continue;
        }
        // Ended jobs make `wait` fail.
        let line = if line == "wait" { "wait || true".into() } else { line };
        script += &format!("{line}\n");
        // A reader pauses between commands; the script waits for what the next command needs.
        if line.starts_with("gpupool serve") {
            script += "until_true gpupool status\n";
        } else if let Some((_, rest)) = line.split_once("run --owner ").filter(|_| line.contains('&')) {
            let owner = rest.split(' ').next().unwrap();
            script += &format!("until_true sh -c 'gpupool lease list | grep {owner}'\n");
        } else if line.starts_with("kill -HUP") {
            script += "until_true sh -c 'gpupool run --owner bob --gpus 2 --no-wait -- true 2>&1 | grep quota'\n";
        }
    }
    script
}

#[test]
fn every_command_of_the_tutorial_does_what_the_page_says() {
    let place = tempfile::tempdir().unwrap();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let programs = Path::new(env!("CARGO_BIN_EXE_gpupool")).parent().unwrap().display();
    let mut bash = Command::new("timeout");
    bash.args(["--kill-after=10", "120", "bash", "-c", &tutorial_script(port)]).current_dir(place.path());
    bash.env("PATH", format!("{programs}:{}", std::env::var("PATH").unwrap())).env("PORT", port.to_string());
    let output = bash.env("HOME", place.path()).output().unwrap();
    let shown = String::from_utf8_lossy(&output.stdout);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{shown}\n{error}");
    for words in ["lab7: 2 GPUs (2 free)", "3 leases, 1 waiting", "4242", "\"owner\": \"erin\""] {
        assert!(shown.contains(words), "{words}: {shown}\n{error}");
    }
    for words in ["the owner's quota is 1", "policy \"guests\""] {
        assert!(error.contains(words), "{words}: {error}");
    }
}
