//! The environment of the command, its signals, and the exit code of `gpupool run`.
use std::process::Command;

use gpupool_api::lease::{HolderBody, LeaseState};
use gpupool_api::tokens::NewToken;
use gpupool_confine::Signal;

use crate::support::{
    BINARY, BackgroundCommand, active_lease, agent_of, lease_end, live_leases, run, run_at, without_variables,
};

#[tokio::test]
async fn the_command_sees_its_gpu_by_uuid_and_the_variables_of_its_lease() {
    let agent = agent_of("2xH100").start().await;
    let client = agent.client_unix();
    let shows = "import os, time\nfor name, value in sorted(os.environ.items()): print(f'{name}={value}', flush=True)\n\
                 print('ready', flush=True)\ntime.sleep(600)";
    let mut line = without_variables(Command::new(BINARY));
    // Variables of an earlier job or of a profile must not reach the command.
    line.env("HIP_VISIBLE_DEVICES", "7")
        .env("ROCR_VISIBLE_DEVICES", "7")
        .env("CUDA_VISIBLE_DEVICES", "7")
        .env("KEPT", "yes");
    line.args(["run", "--endpoint", &format!("unix:{}", agent.socket().display()), "--fraction", "0.5"]);
    line.args(["--label", "team=vision", "--", "python3", "-c", shows]);
    let mut running = BackgroundCommand::start(line);
    let reported: Vec<String> = [
        "CUDA_VISIBLE_DEVICES=",
        "GPUPOOL_FENCING_TOKEN=",
        "GPUPOOL_FRACTION=",
        "GPUPOOL_GPU_IDS=",
        "GPUPOOL_LEASE=",
        "KEPT=",
    ]
    .map(|name| running.wait_for_output(name))
    .into();
    running.wait_for_output("ready");

    let lease = active_lease(&client).await;
    let device = &lease.devices[0];
    let (token, gpu_id) = (lease.token.unwrap().to_string(), device.gpu_id.to_string());
    assert_eq!(reported, [device.uuid.as_str(), &token, "0.5", &gpu_id, &lease.id.to_string(), "yes"]);
    assert_eq!(
        (lease.worker_id.as_deref(), lease.labels.get("team").map(String::as_str)),
        (Some("python3"), Some("vision"))
    );
    assert!(matches!(lease.holder, Some(HolderBody::Process { pid: Some(pid) }) if pid == running.pid()), "{lease:#?}");
    running.signal(Signal::TERM);
    let (code, output, _) = running.ended();
    assert_eq!(code, 143);
    for unset in ["HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"] {
        assert!(!output.contains(unset), "{unset} should not be set:\n{output}");
    }
    assert_eq!(lease_end(&client, lease.id).await, (LeaseState::Released, Some("by_owner".into())));
}

#[tokio::test]
async fn the_exit_code_is_the_commands_and_the_lease_is_always_released() {
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
    for (options, command, code, reported) in cases {
        let (ended, _, messages) = run(&agent, options, command).ended();
        assert_eq!(ended, code, "{command:?}: {messages}");
        assert!(messages.contains(reported), "{command:?}: {messages}");
        // There is one GPU: a kept lease would block the next case.
        assert_eq!(live_leases(&client).await, [], "{command:?} kept its lease");
    }
}

#[tokio::test]
async fn quiet_prints_nothing_and_otherwise_a_summary_is_printed() {
    let agent = agent_of("1xH100").start().await;
    let (code, output, messages) = run(&agent, &["--quiet"], &["echo", "out"]).ended();
    assert_eq!((code, output.as_str(), messages.as_str()), (0, "out", ""));
    let (_, _, messages) = run(&agent, &[], &["true"]).ended();
    let running = format!("running on GPU 0 (NVIDIA H100 80GB HBM3); page: http://localhost:{}", agent.port());
    assert!(messages.contains(&running), "{messages}");
    assert!(messages.contains("waited ") && messages.contains(" on GPU 0 ("), "{messages}");
}

#[tokio::test]
async fn usage_errors_are_reported_before_a_request_is_sent() {
    for (options, reported) in [
        (&["--memory", "8apples"][..], "8GiB"),
        (&["--memory", "8"], "did you mean 8GiB?"),
        (&["--host-memory", "16000"], "did you mean 16000MiB?"),
        (&["--frction", "0.5"], "--fraction"),
        (&["--no-such-option"], "--no-such-option"),
        (&["--gpus", "9999"], "64"),
        (&["--strategy", "luck"], "best-fit"),
        (&["--no-wait", "--wait", "1m"], "--wait"),
    ] {
        let (code, _, messages) = run_at("http://127.0.0.1:1", options, &["true"]).ended();
        assert_eq!(code, 2, "{options:?}: {messages}");
        assert!(messages.contains(reported), "{options:?}: {messages}");
    }
    let (code, _, messages) = run_at("not an address", &[], &["true"]).ended();
    assert!(code == 2 && messages.contains("not an address"), "{code}: {messages}");
}

#[tokio::test]
async fn a_command_that_cannot_run_is_reported_before_a_request_is_sent() {
    for (program, code, reported) in [("no-such-program", 127, "not found"), ("/etc/passwd", 126, "cannot be run")] {
        let (ended, _, messages) = run_at("http://127.0.0.1:1", &[], &[program]).ended();
        assert_eq!(ended, code, "{messages}");
        assert!(messages.starts_with("error: ") && messages.contains(reported), "{messages}");
    }
}

#[tokio::test]
async fn the_command_gets_the_token_only_if_that_is_asked_for() {
    let agent = agent_of("1xH100").start().await;
    let created = agent
        .client_unix()
        .create_token(&NewToken { owner: "alice".into(), admin: false, read_only: false })
        .await
        .unwrap();
    for (options, shown) in [(&[][..], "unset"), (&["--keep-token"], created.secret.as_str())] {
        let mut line = without_variables(Command::new(BINARY));
        line.args(["run", "--endpoint", agent.address()]).args(options).env("GPUPOOL_TOKEN", &created.secret);
        line.args(["--", "sh", "-c", "echo ${GPUPOOL_TOKEN-unset}"]);
        let (code, output, messages) = BackgroundCommand::start(line).ended();
        assert_eq!((code, output.as_str()), (0, shown), "{messages}");
    }
}

#[tokio::test]
async fn impossible_requests_are_refused_with_the_reason() {
    let agent = agent_of("1xH100").start().await;
    let (code, _, messages) = run(&agent, &["--gpus", "2"], &["true"]).ended();
    assert_eq!(code, 1, "{messages}");
    assert!(messages.starts_with("error: "), "{messages}");
    let (code, _, messages) = run(&agent, &["--model", "MI300X", "--no-wait"], &["true"]).ended();
    assert!(code == 1 && messages.contains("no GPU matches"), "{code}: {messages}");
}

#[tokio::test]
async fn a_missing_agent_is_reported_with_a_remedy() {
    let (code, _, messages) = run_at("http://127.0.0.1:1", &[], &["true"]).ended();
    assert!(code == 1 && messages.contains("gpupool serve"), "{code}: {messages}");
}

#[tokio::test]
async fn signals_reach_the_command() {
    let agent = agent_of("1xH100").start().await;
    // Waits for signals instead of handling them, because a sleep would delay a handler called just before it.
    let script = "import signal\n\
        heard = {signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT, signal.SIGINT, signal.SIGWINCH, signal.SIGCONT, signal.SIGTERM}\n\
        signal.pthread_sigmask(signal.SIG_BLOCK, heard)\n\
        print('ready', flush=True)\n\
        while (number := signal.sigwait(heard)) != signal.SIGTERM: print('got', int(number), flush=True)\n\
        exit(7)";
    // Ignored signals stay ignored, and the test run may ignore some.
    let mut line = without_variables(Command::new("env"));
    line.args(["--default-signal", BINARY, "run", "--endpoint", &format!("unix:{}", agent.socket().display())]);
    line.args(["--", "python3", "-c", script]);
    let mut running = BackgroundCommand::start(line);
    running.wait_for_output("ready");
    for signal in [Signal::HUP, Signal::USR1, Signal::USR2, Signal::QUIT, Signal::INT, Signal::WINCH] {
        running.signal(signal);
        running.wait_for_output(&format!("got {}", signal.as_raw()));
    }
    running.signal(Signal::TSTP);
    running.signal(Signal::CONT);
    running.wait_for_output(&format!("got {}", Signal::CONT.as_raw()));
    running.signal(Signal::TERM);
    assert_eq!(running.code(), 7);
}

#[tokio::test]
async fn nohup_protects_the_command_from_a_hang_up() {
    let agent = agent_of("1xH100").start().await;
    let mut line = without_variables(Command::new("nohup"));
    let endpoint = format!("unix:{}", agent.socket().display());
    line.args([BINARY, "run", "--endpoint", &endpoint, "--"]);
    line.args(["sh", "-c", "kill -HUP $$; echo ready; exec sleep 600"]);
    let mut running = BackgroundCommand::start(line);
    running.wait_for_output("ready");
    running.signal(Signal::HUP);
    running.signal(Signal::TERM);
    assert_eq!(running.code(), 143, "it should have ended by TERM, not by HUP");
}
