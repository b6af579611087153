//! However `gpupool run` or its command ends, no process and no lease is left.
use gpupool_api::lease::LeaseState;
use gpupool_confine::Signal;
use gpupool_testkit::TestAgent;

use crate::support::{Running, Watched, agent_of, live, over, run, run_at, the_active};

/// A command that starts one child in the ordinary way and one that escapes by setsid and a double fork, tells the pids
/// of all three, and then does this (Python).
fn escaping(finally: &str) -> String {
    format!(
        "import os, time\n\
         def tell(): os.write(1, b'pid %d\\n' % os.getpid())\n\
         if os.fork() == 0:\n    tell(); time.sleep(600)\n\
         if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        tell(); time.sleep(600)\n    os._exit(0)\n\
         tell()\n{finally}\n"
    )
}

fn three(running: &mut Running) -> Vec<Watched> {
    (0..3).map(|_| Watched::of(&running.says("pid "))).collect()
}

fn expect_ends(processes: &[Watched]) {
    processes.iter().for_each(Watched::expect_end);
}

/// Starts an escaping command; its processes and the number of its lease.
async fn escaped(agent: &TestAgent) -> (Running, Vec<Watched>, u64) {
    let mut running = run(agent, &[], &["python3", "-c", &escaping("time.sleep(600)")]);
    let processes = three(&mut running);
    let lease = the_active(&agent.client_unix()).await;
    (running, processes, lease.id)
}

#[tokio::test]
async fn a_kill_of_run_itself_ends_the_command_and_its_lease() {
    let agent = agent_of("1xH100").start().await;
    let mut watch = agent.watch_events().await;
    let (running, processes, lease) = escaped(&agent).await;
    running.signal(Signal::KILL);
    expect_ends(&processes);
    watch.wait_for_lease("ended", lease).await;
    assert_eq!(over(&agent.client_unix(), lease).await, (LeaseState::Released, Some("holder_gone".into())));
    // Nothing may hold the device back: the next one gets it.
    assert_eq!(run(&agent, &[], &["true"]).code(), 0);
}

#[tokio::test]
async fn a_kill_of_run_itself_over_tcp_ends_the_command_and_its_lease() {
    let agent = agent_of("1xH100").start().await;
    let mut watch = agent.watch_events().await;
    let mut running = run_at(agent.address(), &[], &["python3", "-c", &escaping("time.sleep(600)")]);
    let processes = three(&mut running);
    let lease = the_active(&agent.client_unix()).await;
    assert_eq!(lease.holder, Some(gpupool_api::lease::HolderBody::Connection));
    running.signal(Signal::KILL);
    expect_ends(&processes);
    watch.wait_for_lease("ended", lease.id).await;
    assert_eq!(run(&agent, &[], &["true"]).code(), 0);
}

#[tokio::test]
async fn a_kill_of_the_command_ends_all_it_started() {
    let agent = agent_of("1xH100").start().await;
    let (mut running, processes, lease) = escaped(&agent).await;
    let job = agent.client_unix().follow(lease, std::time::Duration::ZERO).await.unwrap();
    assert_eq!(job.state, LeaseState::Active);
    // The last to tell may be any of the three; the command is the one whose children the others are.
    kill_the_command(&running);
    assert_eq!(running.code(), 137);
    expect_ends(&processes);
    assert_eq!(live(&agent.client_unix()).await, []);
}

/// Finds the command below `gpupool run` (run → guard → keeper → command) and kills it.
fn kill_the_command(running: &Running) {
    use gpupool_confine::process::ProcFs;
    let procfs = ProcFs::system();
    let all = procfs.processes().unwrap();
    let child = |parent: u32| all.iter().find(|stat| stat.parent == parent).map(|stat| stat.pid).unwrap();
    let keeper = child(child(running.pid()));
    let command = all.iter().filter(|stat| stat.parent == keeper).min_by_key(|stat| stat.started).unwrap();
    Watched::of(&command.pid.to_string()).signal(Signal::KILL);
}

#[tokio::test]
async fn a_command_that_ends_leaves_no_daemon_on_the_gpu() {
    let agent = agent_of("1xH100").start().await;
    let wait = "import sys\nsys.stdout.flush()\ntime.sleep(0.2)";
    let mut running = run(&agent, &[], &["python3", "-c", &escaping(wait)]);
    let processes = three(&mut running);
    assert_eq!(running.code(), 0);
    expect_ends(&processes);
    assert_eq!(live(&agent.client_unix()).await, []);
}

#[tokio::test]
async fn an_interrupt_ends_the_command_and_its_lease() {
    let agent = agent_of("1xH100").start().await;
    let (mut running, processes, lease) = escaped(&agent).await;
    running.signal(Signal::INT);
    let code = running.code();
    assert!([1, 130].contains(&code), "Python ends by KeyboardInterrupt: {code}");
    expect_ends(&processes);
    assert_eq!(over(&agent.client_unix(), lease).await, (LeaseState::Released, Some("by_owner".into())));
}
