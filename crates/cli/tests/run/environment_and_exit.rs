//! The command sees its GPU and nothing else, and its end is the end of `gpupool run`.
use std::process::Command;

use gpupool_api::lease::{HolderBody, LeaseState};
use gpupool_confine::Signal;

use crate::support::{BINARY, Running, agent_of, bare, live, over, run, run_at, the_active};

#[tokio::test]
async fn the_command_sees_its_gpu_by_uuid_and_the_facts_of_its_lease() {
    let agent = agent_of("2xH100").start().await;
    let client = agent.client_unix();
    let shows = "import os, time\nfor name, value in sorted(os.environ.items()): print(f'{name}={value}', flush=True)\n\
                 print('ready', flush=True)\ntime.sleep(600)";
    let mut line = bare(Command::new(BINARY));
    // What an earlier job or a careless profile left must not reach the command.
    line.env("HIP_VISIBLE_DEVICES", "7")
        .env("ROCR_VISIBLE_DEVICES", "7")
        .env("CUDA_VISIBLE_DEVICES", "7")
        .env("KEPT", "yes");
    line.args(["run", "--endpoint", &format!("unix:{}", agent.socket().display()), "--fraction", "0.5"]);
    line.args(["--label", "team=vision", "--", "python3", "-c", shows]);
    let mut running = Running::start(line);
    let told: Vec<String> = [
        "CUDA_VISIBLE_DEVICES=",
        "GPUPOOL_FENCING_TOKEN=",
        "GPUPOOL_FRACTION=",
        "GPUPOOL_GPU_IDS=",
        "GPUPOOL_LEASE=",
        "KEPT=",
    ]
    .map(|name| running.says(name))
    .into();
    running.says("ready");

    let lease = the_active(&client).await;
    let device = &lease.devices[0];
    let (token, gpu_id) = (lease.token.unwrap().to_string(), device.gpu_id.to_string());
    assert_eq!(told, [device.uuid.as_str(), &token, "0.5", &gpu_id, &lease.id.to_string(), "yes"]);
    assert_eq!(
        (lease.worker_id.as_deref(), lease.labels.get("team").map(String::as_str)),
        (Some("python3"), Some("vision"))
    );
    assert!(matches!(lease.holder, Some(HolderBody::Process { pid }) if pid == running.pid()), "{lease:#?}");
    running.signal(Signal::TERM);
    let (code, output, _) = running.ended();
    assert_eq!(code, 143);
    for unset in ["HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"] {
        assert!(!output.contains(unset), "{unset} should not be set:\n{output}");
    }
    assert_eq!(over(&client, lease.id).await, (LeaseState::Released, Some("by_owner".into())));
}

#[tokio::test]
async fn the_exit_code_is_the_commands_and_the_lease_is_given_back_each_time() {
    let agent = agent_of("1xH100").start().await;
    let client = agent.client_unix();
    let cases: [(&[&str], &[&str], i32, &str); 8] = [
        (&[], &["true"], 0, "exit code 0"),
        (&[], &["sh", "-c", "exit 3"], 3, "exit code 3"),
        (&[], &["sh", "-c", "kill -TERM $$"], 143, "exit code 143"),
        (&[], &["sh", "-c", "kill -KILL $$"], 137, "exit code 137"),
        (&[], &["/nonexistent/program"], 127, "not found"),
        (&[], &["/etc/passwd"], 126, "cannot be run"),
        (&["--timeout", "200ms"], &["sleep", "600"], 124, "--timeout"),
        (
            &["--timeout", "200ms", "--kill-after", "100ms"],
            &["sh", "-c", "trap '' TERM; while :; do sleep 600; done"],
            124,
            "--timeout",
        ),
    ];
    for (options, command, code, told) in cases {
        let (ended, _, messages) = run(&agent, options, command).ended();
        assert_eq!(ended, code, "{command:?}: {messages}");
        assert!(messages.contains(told), "{command:?}: {messages}");
        // Only one GPU: the next case would not start if this one had kept it.
        assert_eq!(live(&client).await, [], "{command:?} kept its lease");
    }
}

#[tokio::test]
async fn quiet_says_nothing_and_a_summary_is_said_without_it() {
    let agent = agent_of("1xH100").start().await;
    let (code, output, messages) = run(&agent, &["--quiet"], &["echo", "out"]).ended();
    assert_eq!((code, output.as_str(), messages.as_str()), (0, "out", ""));
    let (_, _, messages) = run(&agent, &[], &["true"]).ended();
    assert!(messages.contains("waited ") && messages.contains(" on GPU 0 ("), "{messages}");
}

#[tokio::test]
async fn wrong_usage_is_told_before_anybody_is_asked() {
    for (options, told) in [
        (&["--memory", "8apples"][..], "8GiB"),
        (&["--gpus", "9999"], "64"),
        (&["--strategy", "luck"], "best-fit"),
        (&["--no-wait", "--wait", "1m"], "--wait"),
    ] {
        let (code, _, messages) = run_at("http://127.0.0.1:1", options, &["true"]).ended();
        assert_eq!(code, 2, "{options:?}: {messages}");
        assert!(messages.contains(told), "{options:?}: {messages}");
    }
    let (code, _, messages) = run_at("not an address", &[], &["true"]).ended();
    assert!(code == 2 && messages.contains("not an address"), "{code}: {messages}");
}

#[tokio::test]
async fn what_can_never_be_granted_is_refused_with_the_reason() {
    let agent = agent_of("1xH100").start().await;
    let (code, _, messages) = run(&agent, &["--gpus", "2"], &["true"]).ended();
    assert_eq!(code, 1, "{messages}");
    assert!(messages.starts_with("error: "), "{messages}");
    let (code, _, messages) = run(&agent, &["--model", "MI300X", "--no-wait"], &["true"]).ended();
    assert!(code == 1 && messages.contains("no GPU matches"), "{code}: {messages}");
}

#[tokio::test]
async fn an_agent_that_is_not_there_is_told_with_what_to_do() {
    let (code, _, messages) = run_at("http://127.0.0.1:1", &[], &["true"]).ended();
    assert!(code == 1 && messages.contains("gpupool serve"), "{code}: {messages}");
}

#[tokio::test]
async fn signals_reach_the_command() {
    let agent = agent_of("1xH100").start().await;
    // Waits for signals rather than handling them: a handler called right before a sleep would be held up by it.
    let script = "import signal\n\
        heard = {signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT, signal.SIGINT, signal.SIGWINCH, signal.SIGCONT, signal.SIGTERM}\n\
        signal.pthread_sigmask(signal.SIG_BLOCK, heard)\n\
        print('ready', flush=True)\n\
        while (number := signal.sigwait(heard)) != signal.SIGTERM: print('got', int(number), flush=True)\n\
        exit(7)";
    // What is ignored stays ignored, and whoever runs the tests may ignore something.
    let mut line = bare(Command::new("env"));
    line.args(["--default-signal", BINARY, "run", "--endpoint", &format!("unix:{}", agent.socket().display())]);
    line.args(["--", "python3", "-c", script]);
    let mut running = Running::start(line);
    running.says("ready");
    for signal in [Signal::HUP, Signal::USR1, Signal::USR2, Signal::QUIT, Signal::INT, Signal::WINCH] {
        running.signal(signal);
        running.says(&format!("got {}", signal.as_raw()));
    }
    running.signal(Signal::TSTP);
    running.signal(Signal::CONT);
    running.says(&format!("got {}", Signal::CONT.as_raw()));
    running.signal(Signal::TERM);
    assert_eq!(running.code(), 7);
}

#[tokio::test]
async fn nohup_keeps_a_hang_up_from_ending_the_command() {
    let agent = agent_of("1xH100").start().await;
    let mut line = bare(Command::new("nohup"));
    let endpoint = format!("unix:{}", agent.socket().display());
    line.args([BINARY, "run", "--endpoint", &endpoint, "--"]);
    line.args(["sh", "-c", "kill -HUP $$; echo ready; exec sleep 600"]);
    let mut running = Running::start(line);
    running.says("ready");
    running.signal(Signal::HUP);
    running.signal(Signal::TERM);
    assert_eq!(running.code(), 143, "it should have ended by TERM, not by HUP");
}
