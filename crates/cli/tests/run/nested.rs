//! A `gpupool run` within a `gpupool run`.
use gpupool_client::LeaseQuery;

use crate::support::{BINARY, agent_of, run};

#[tokio::test]
async fn a_run_within_a_run_uses_its_lease_or_fails_at_once() {
    let agent = agent_of("1xH100").start().await;
    let client = agent.client_unix();
    let inner = |options: &str| {
        let socket = agent.socket().display().to_string();
        format!("'{BINARY}' run --endpoint unix:{socket} {options} -- sh -c 'echo inner $GPUPOOL_LEASE; exit 4'")
    };
    let (code, output, messages) =
        run(&agent, &["--fraction", "0.5"], &["sh", "-c", &inner("--fraction 0.25")]).ended();
    assert_eq!((code, output.as_str()), (4, "inner 1"), "{messages}");
    assert!(messages.contains("running under lease 1 of the outer command on 0.5 of GPU 0"), "{messages}");
    assert!(messages.contains("all its commands see all devices"), "{messages}");
    for options in ["", "--gpus 2", "--fraction 0.6"] {
        let (code, output, messages) = run(&agent, &["--fraction", "0.5"], &["sh", "-c", &inner(options)]).ended();
        assert_eq!((code, output.as_str()), (1, ""), "{options}: {messages}");
        assert!(messages.contains("0.5 of GPU 0") && messages.contains("asks for more"), "{options}: {messages}");
    }
    let all = LeaseQuery { state: Some("all".into()), ..LeaseQuery::default() };
    assert_eq!(client.leases(&all).await.unwrap().leases.len(), 4, "no inner command requested a lease");
    // The lease of the variables has ended, so it is no outer command's.
    let ended = format!("GPUPOOL_LEASE=1 GPUPOOL_FENCING_TOKEN=1 {}", inner(""));
    let outer = std::process::Command::new("sh").args(["-c", &ended]).output().unwrap();
    assert_eq!((outer.status.code(), outer.stdout.as_slice()), (Some(4), &b"inner 5\n"[..]), "{outer:?}");
}
