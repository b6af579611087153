//! No process and no lease is left, however `gpupool run` or its command ends.
use gpupool_api::lease::LeaseState;
use gpupool_confine::Signal;
use gpupool_testkit::TestAgent;

use crate::support::{BackgroundCommand, ObservedProcess, active_lease, agent_of, lease_end, live_leases, run, run_at};

/// Returns a Python program that starts an ordinary child and one that escapes by setsid and a double fork, prints the
/// pids of all three processes, and then runs `finally`.
fn escaping_program(finally: &str) -> String {
    format!(
        "import os, time\n\
         def tell(): os.write(1, b'pid %d\\n' % os.getpid())\n\
         if os.fork() == 0:\n    tell(); time.sleep(600)\n\
         if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        tell(); time.sleep(600)\n    os._exit(0)\n\
         tell()\n{finally}\n"
    )
}

fn await_three_pids(running: &mut BackgroundCommand) -> Vec<ObservedProcess> {
    (0..3).map(|_| ObservedProcess::of(&running.wait_for_output("pid "))).collect()
}

fn expect_all_exit(processes: &[ObservedProcess]) {
    processes.iter().for_each(ObservedProcess::wait_for_exit);
}

/// Starts an escaping command and returns its processes and its lease.
async fn start_escaping(agent: &TestAgent) -> (BackgroundCommand, Vec<ObservedProcess>, u64) {
    let mut running = run(agent, &[], &["python3", "-c", &escaping_program("time.sleep(600)")]);
    let processes = await_three_pids(&mut running);
    let lease = active_lease(&agent.client_unix()).await;
    (running, processes, lease.id)
}

#[tokio::test]
async fn killing_gpupool_ends_the_command_and_its_lease() {
    let agent = agent_of("1xH100").start().await;
    let mut watch = agent.watch_events().await;
    let (running, processes, lease) = start_escaping(&agent).await;
    running.signal(Signal::KILL);
    expect_all_exit(&processes);
    watch.wait_for_lease("ended", lease).await;
    assert_eq!(lease_end(&agent.client_unix(), lease).await, (LeaseState::Released, Some("holder_gone".into())));
    // The device must be free for the next command.
    assert_eq!(run(&agent, &[], &["true"]).code(), 0);
}

#[tokio::test]
async fn killing_gpupool_over_tcp_ends_the_command_and_its_lease() {
    let agent = agent_of("1xH100").start().await;
    let mut watch = agent.watch_events().await;
    let mut running = run_at(agent.address(), &[], &["python3", "-c", &escaping_program("time.sleep(600)")]);
    let processes = await_three_pids(&mut running);
    let lease = active_lease(&agent.client_unix()).await;
    assert_eq!(lease.holder, Some(gpupool_api::lease::HolderBody::Connection));
    running.signal(Signal::KILL);
    expect_all_exit(&processes);
    watch.wait_for_lease("ended", lease.id).await;
    assert_eq!(run(&agent, &[], &["true"]).code(), 0);
}

#[tokio::test]
async fn killing_the_command_ends_all_its_processes() {
    let agent = agent_of("1xH100").start().await;
    let (mut running, processes, lease) = start_escaping(&agent).await;
    let job = agent.client_unix().follow(lease, std::time::Duration::ZERO).await.unwrap();
    assert_eq!(job.state, LeaseState::Active);
    // The order of the pids is not fixed; the command is the parent of the others.
    kill_the_command(&running);
    assert_eq!(running.code(), 137);
    expect_all_exit(&processes);
    assert_eq!(live_leases(&agent.client_unix()).await, []);
}

/// Finds the command below `gpupool run` (run → guard → supervisor → command) and kills it.
fn kill_the_command(running: &BackgroundCommand) {
    use gpupool_confine::process::ProcFs;
    let procfs = ProcFs::system();
    let all = procfs.processes().unwrap();
    let child = |parent: u32| all.iter().find(|stat| stat.parent == parent).map(|stat| stat.pid).unwrap();
    let keeper = child(child(running.pid()));
    let command = all.iter().filter(|stat| stat.parent == keeper).min_by_key(|stat| stat.started).unwrap();
    ObservedProcess::of(&command.pid.to_string()).signal(Signal::KILL);
}

#[tokio::test]
async fn a_command_that_ends_leaves_no_daemon() {
    let agent = agent_of("1xH100").start().await;
    let wait = "import sys\nsys.stdout.flush()\ntime.sleep(0.2)";
    let mut running = run(&agent, &[], &["python3", "-c", &escaping_program(wait)]);
    let processes = await_three_pids(&mut running);
    assert_eq!(running.code(), 0);
    expect_all_exit(&processes);
    assert_eq!(live_leases(&agent.client_unix()).await, []);
}

#[tokio::test]
async fn an_interrupt_ends_the_command_and_its_lease() {
    let agent = agent_of("1xH100").start().await;
    let (mut running, processes, lease) = start_escaping(&agent).await;
    running.signal(Signal::INT);
    let code = running.code();
    assert!([1, 130].contains(&code), "Python ends by KeyboardInterrupt: {code}");
    expect_all_exit(&processes);
    assert_eq!(lease_end(&agent.client_unix(), lease).await, (LeaseState::Released, Some("by_owner".into())));
}
