//! The commands of docs/api.md return the documented responses.

use std::path::Path;
use std::process::Command;

use gpupool_testkit::TestAgent;

/// Command of the guide, and the status after its `#`, optionally followed by `: ` and a few words.
struct GuideExample {
    command: String,
    status: String,
    words: String,
}

fn examples() -> Vec<GuideExample> {
    let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/api.md");
    let text = std::fs::read_to_string(guide).unwrap();
    let blocks = text.split("```sh\n").skip(1).map(|rest| rest.split("```").next().unwrap());
    let example = |line: &str| {
        let (command, printed) = line.rsplit_once('#').unwrap_or_else(|| panic!("no status behind {line:?}"));
        let (status, words) = printed.trim().split_once(": ").unwrap_or((printed.trim(), ""));
        GuideExample { command: command.trim().into(), status: status.into(), words: words.into() }
    };
    blocks.flat_map(str::lines).map(example).collect()
}

/// Runs the command and returns body and status of the response.
fn run(command: &str) -> (String, String) {
    let script = format!("curl() {{ command curl -sS -w '\\n%{{http_code}}' \"$@\"; }}; {command}");
    let output = Command::new("sh").args(["-c", &script]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let (body, status) = text.rsplit_once('\n').unwrap_or_else(|| panic!("{command} says nothing: {output:?}"));
    (body.into(), status.into())
}

#[tokio::test]
async fn every_example_of_the_guide_returns_the_documented_status() {
    let agent = TestAgent::builder(env!("CARGO_BIN_EXE_gpupool")).simulate("2xH100").start().await;
    let socket = agent.socket().to_str().unwrap();
    let examples = examples();
    assert!(examples.len() > 40, "the guide shows how to use the interface");
    for example in examples {
        let command = example.command.replace("localhost:8000", agent.address()).replace("agent.sock", socket);
        let (body, status) = run(&command);
        assert_eq!(status, example.status, "{command}\n{body}\n{}", agent.log());
        if status.starts_with('4') {
            assert!(body.contains(&format!("\"code\":\"{}\"", example.words)), "{command}\n{body}");
        } else if let Some(number) = example.words.split("lease ").nth(1) {
            let number: String = number.chars().take_while(char::is_ascii_digit).collect();
            assert!(body.contains(&format!("\"id\":{number},")), "{command}\n{body}");
        }
    }
}
