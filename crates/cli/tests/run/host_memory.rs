//! Host memory limits of commands: enforced by the kernel or else by `gpupool run`, also for users other than root
//! through an agent of root.
use std::process::Command;

use gpupool_api::lease::{HolderBody, LeaseState};
use gpupool_confine::Signal;
use gpupool_confine::cgroup::{CgroupLayout, CgroupManager};
use gpupool_testkit::TestAgent;

use crate::support::{
    BINARY, BackgroundCommand, ObservedProcess, active_lease, agent_of, is_root, lease_end, live_leases, run, run_at,
    skipped, without_variables,
};

/// Allocates memory without end.
const HOG: &str = "b = []\nwhile True: b.append(bytearray(b'x') * (16 << 20))";
/// Uid of a user who is not root and has no home.
const NOBODY_UID: u32 = 65_534;

#[tokio::test]
async fn the_kernel_kills_a_command_above_its_limit() {
    let agent = agent_of("1xH100").start().await;
    let can = CgroupManager::detect();
    if !can.limits_memory() {
        skipped("the limit by the kernel", &can.describe());
        return;
    }
    let hog = |endpoint: &str| run_at(endpoint, &["--host-memory", "128MiB"], &["python3", "-c", HOG]).ended();
    // Over TCP the agent does not know the process, so `gpupool run` creates the group.
    let socket = format!("unix:{}", agent.socket().display());
    for (endpoint, whose) in [(socket.as_str(), "of the agent"), (agent.address(), "of this user")] {
        let (code, _, messages) = hog(endpoint);
        assert_eq!(code, 137, "{messages}");
        assert!(messages.contains(&format!("limited to 128 MiB by a control group {whose}")), "{messages}");
        assert!(messages.contains("more than 128 MiB of host memory"), "{messages}");
        assert_eq!(live_leases(&agent.client_unix()).await, []);
    }
}

#[tokio::test]
async fn a_command_below_its_limit_is_not_affected() {
    let agent = agent_of("1xH100").start().await;
    let (code, _, messages) = run(&agent, &["--host-memory", "1GiB"], &["true"]).ended();
    assert_eq!(code, 0, "{messages}");
    assert!(messages.contains("limited to 1024 MiB"), "{messages}");
}

#[tokio::test]
async fn without_control_groups_the_command_and_its_orphans_are_polled() {
    // Neither an agent without root rights nor its user can create control groups.
    let Some(agent) = unprivileged_agent().await else {
        return skipped("the polled limit", "a user other than root can create control groups here");
    };
    let double_fork = format!("import os\nif os.fork(): os._exit(0) if os.fork() else None\nos.setsid()\n{HOG}");
    let forks = format!("import os, time\nif os.fork() == 0:\n    exec({double_fork:?})\ntime.sleep(600)");
    for hog in [HOG, &forks] {
        let mut line = unprivileged_command(BINARY);
        let endpoint = format!("unix:{}", agent.socket().display());
        line.args(["run", "--endpoint", &endpoint, "--host-memory", "128MiB", "--", "python3", "-c", hog]);
        let (code, _, messages) = BackgroundCommand::start(line).ended();
        assert_eq!(code, 137, "{messages}");
        assert!(messages.contains("by polling every 10 ms to 1 s"), "{messages}");
        assert!(messages.contains("the command was killed: it used"), "{messages}");
        assert_eq!(live_leases(&agent.client_unix()).await, []);
    }
}

/// Starts an agent as a user other than root, if such a user cannot create control groups.
async fn unprivileged_agent() -> Option<UnprivilegedAgent> {
    let folder = tempfile::TempDir::with_prefix("gpupool-test-").unwrap();
    let mut binary = std::path::PathBuf::from(BINARY);
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(folder.path(), Some(NOBODY_UID), Some(NOBODY_UID)).unwrap();
        binary = folder.path().join("gpupool-as-nobody");
        // Another process writes the file, because a file that this process has open for writing cannot be run.
        let script = format!(
            "#!/bin/sh\nexec setpriv --reuid {NOBODY_UID} --regid {NOBODY_UID} --clear-groups {BINARY} \"$@\"\n"
        );
        let mut writes = Command::new("sh");
        writes.args(["-c", "printf '%s' \"$1\" > \"$0\" && chmod 755 \"$0\""]).arg(&binary).arg(script);
        assert!(writes.status().unwrap().success());
    }
    let agent = TestAgent::builder(&binary).simulate("1xH100").state_dir(folder.path().join("state")).start().await;
    let pool = agent.client_unix().pool().await.unwrap();
    pool.confinement.starts_with("none").then_some(UnprivilegedAgent { agent, _folder: folder })
}

struct UnprivilegedAgent {
    agent: TestAgent,
    _folder: tempfile::TempDir,
}

impl std::ops::Deref for UnprivilegedAgent {
    type Target = TestAgent;
    fn deref(&self) -> &TestAgent {
        &self.agent
    }
}

/// Prepares a program as a user other than root.
fn unprivileged_command(program: &str) -> Command {
    if !rustix::process::geteuid().is_root() {
        return without_variables(Command::new(program));
    }
    let mut command = without_variables(Command::new("setpriv"));
    command.args(["--reuid", &NOBODY_UID.to_string(), "--regid", &NOBODY_UID.to_string(), "--clear-groups", program]);
    command
}

#[tokio::test]
async fn a_user_other_than_root_owns_the_lease_and_runs_in_a_group_of_the_agent() {
    const STORY: &str = "a user other than root";
    if !is_root(STORY) {
        return;
    }
    let folder = tempfile::TempDir::with_prefix("gpupool-test-").unwrap();
    // Other users must reach the socket; the agent's files stay private.
    std::fs::set_permissions(folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let agent = agent_of("1xH100").state_dir(folder.path()).start().await;
    let mut line = unprivileged_command(BINARY);
    let endpoint = format!("unix:{}", agent.socket().display());
    line.args(["run", "--endpoint", &endpoint, "--host-memory", "256MiB", "--"]);
    line.args(["sh", "-c", "echo user $(id -u); cat /proc/self/cgroup; echo pid $$; exec sleep 600"]);
    let mut running = BackgroundCommand::start(line);
    assert_eq!(running.wait_for_output("user "), NOBODY_UID.to_string());
    let has_groups = CgroupManager::detect().can_create();
    if has_groups {
        let tracked_by = if CgroupManager::detect().layout() == CgroupLayout::V1 { "" } else { "0::" };
        let place = running.wait_for_output(tracked_by);
        assert!(place.contains("gpupool") && place.contains("lease-"), "the command is in {place:?}");
    } else {
        skipped(STORY, &CgroupManager::detect().describe());
    }
    let command = ObservedProcess::of(&running.wait_for_output("pid "));
    let lease = active_lease(&agent.client_unix()).await;
    assert_eq!(
        (lease.owner.as_str(), lease.holder),
        ("nobody", Some(HolderBody::Process { pid: Some(running.pid()) }))
    );

    running.signal(Signal::KILL);
    command.wait_for_exit();
    assert_eq!(run(&agent, &[], &["true"]).code(), 0);
    assert_eq!(lease_end(&agent.client_unix(), lease.id).await.0, LeaseState::Released);

    if CgroupManager::detect().limits_memory() {
        let mut line = unprivileged_command(BINARY);
        line.args(["run", "--endpoint", &endpoint, "--host-memory", "128MiB", "--", "python3", "-c", HOG]);
        let (code, _, messages) = BackgroundCommand::start(line).ended();
        assert_eq!(code, 137, "{messages}");
        assert!(
            messages.contains("control group of the agent") && messages.contains("more than 128 MiB"),
            "{messages}"
        );
    }
}
