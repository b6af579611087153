//! A command that uses more host memory than it may is killed, by the kernel where it can, else by `gpupool run`; and a
//! user who is not root can do all of it through an agent of root.
use std::process::Command;

use gpupool_api::lease::{HolderBody, LeaseState};
use gpupool_confine::Signal;
use gpupool_confine::cgroup::{CgroupLayout, CgroupManager};
use gpupool_testkit::TestAgent;

use crate::support::{BINARY, Running, Watched, agent_of, bare, is_root, live, over, run, run_at, skipped, the_active};

/// Takes ever more memory.
const HOG: &str = "b = []\nwhile True: b.append(bytearray(b'x') * (16 << 20))";
/// A user nobody is: not root, and without a home.
const NOBODY: u32 = 65_534;

#[tokio::test]
async fn the_kernel_kills_a_command_that_takes_too_much() {
    let agent = agent_of("1xH100").start().await;
    let can = CgroupManager::detect();
    if !can.limits_memory() {
        skipped("the limit by the kernel", &can.describe());
        return;
    }
    let hog = |endpoint: &str| run_at(endpoint, &["--host-memory", "128MiB"], &["python3", "-c", HOG]).ended();
    // Over TCP the agent does not know the command's process, so the group is our own.
    let socket = format!("unix:{}", agent.socket().display());
    for (endpoint, whose) in [(socket.as_str(), "of the agent"), (agent.address(), "of this user")] {
        let (code, _, messages) = hog(endpoint);
        assert_eq!(code, 137, "{messages}");
        assert!(messages.contains(&format!("limited to 128 MiB by a control group {whose}")), "{messages}");
        assert!(messages.contains("more than 128 MiB of host memory"), "{messages}");
        assert_eq!(live(&agent.client_unix()).await, []);
    }
}

#[tokio::test]
async fn a_command_within_its_memory_is_left_alone() {
    let agent = agent_of("1xH100").start().await;
    let (code, _, messages) = run(&agent, &["--host-memory", "1GiB"], &["true"]).ended();
    assert_eq!(code, 0, "{messages}");
    assert!(messages.contains("limited to 1024 MiB"), "{messages}");
}

#[tokio::test]
async fn without_control_groups_the_command_and_what_it_left_is_watched() {
    // An agent without root's rights can make no group, and neither can the user who asks it.
    let Some(agent) = agent_of_nobody().await else {
        return skipped("the limit by looking", "a user who is not root can make control groups here");
    };
    let double_fork = format!("import os\nif os.fork(): os._exit(0) if os.fork() else None\nos.setsid()\n{HOG}");
    let forks = format!("import os, time\nif os.fork() == 0:\n    exec({double_fork:?})\ntime.sleep(600)");
    for hog in [HOG, &forks] {
        let mut line = as_nobody(BINARY);
        let endpoint = format!("unix:{}", agent.socket().display());
        line.args(["run", "--endpoint", &endpoint, "--host-memory", "128MiB", "--", "python3", "-c", hog]);
        let (code, _, messages) = Running::start(line).ended();
        assert_eq!(code, 137, "{messages}");
        assert!(messages.contains("by polling every 10 ms to 1 s"), "{messages}");
        assert!(messages.contains("the command was killed: it used"), "{messages}");
        assert_eq!(live(&agent.client_unix()).await, []);
    }
}

/// An agent of a user who is not root, if such a user can make no control group.
async fn agent_of_nobody() -> Option<NobodysAgent> {
    let folder = tempfile::TempDir::with_prefix("gpupool-test-").unwrap();
    let mut binary = std::path::PathBuf::from(BINARY);
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(folder.path(), Some(NOBODY), Some(NOBODY)).unwrap();
        binary = folder.path().join("gpupool-as-nobody");
        // Another process writes it: a file that this process has open for writing cannot be run.
        let script =
            format!("#!/bin/sh\nexec setpriv --reuid {NOBODY} --regid {NOBODY} --clear-groups {BINARY} \"$@\"\n");
        let mut writes = Command::new("sh");
        writes.args(["-c", "printf '%s' \"$1\" > \"$0\" && chmod 755 \"$0\""]).arg(&binary).arg(script);
        assert!(writes.status().unwrap().success());
    }
    let agent = TestAgent::builder(&binary).simulate("1xH100").state_dir(folder.path().join("state")).start().await;
    let pool = agent.client_unix().pool().await.unwrap();
    pool.confinement.starts_with("none").then_some(NobodysAgent { agent, _folder: folder })
}

struct NobodysAgent {
    agent: TestAgent,
    _folder: tempfile::TempDir,
}

impl std::ops::Deref for NobodysAgent {
    type Target = TestAgent;
    fn deref(&self) -> &TestAgent {
        &self.agent
    }
}

/// A program as a user who is not root: ourselves, if we are one.
fn as_nobody(program: &str) -> Command {
    if !rustix::process::geteuid().is_root() {
        return bare(Command::new(program));
    }
    let mut command = bare(Command::new("setpriv"));
    command.args(["--reuid", &NOBODY.to_string(), "--regid", &NOBODY.to_string(), "--clear-groups", program]);
    command
}

#[tokio::test]
async fn a_user_who_is_not_root_owns_its_lease_and_runs_in_a_group_of_the_agent() {
    const STORY: &str = "a user who is not root";
    if !is_root(STORY) {
        return;
    }
    let folder = tempfile::TempDir::with_prefix("gpupool-test-").unwrap();
    // Others must be able to reach the socket; what the agent keeps there stays its own.
    std::fs::set_permissions(folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let agent = agent_of("1xH100").state_dir(folder.path()).start().await;
    let mut line = as_nobody(BINARY);
    let endpoint = format!("unix:{}", agent.socket().display());
    line.args(["run", "--endpoint", &endpoint, "--host-memory", "256MiB", "--"]);
    line.args(["sh", "-c", "echo user $(id -u); cat /proc/self/cgroup; echo pid $$; exec sleep 600"]);
    let mut running = Running::start(line);
    assert_eq!(running.says("user "), NOBODY.to_string());
    let has_groups = CgroupManager::detect().can_create();
    if has_groups {
        let tracked_by = if CgroupManager::detect().layout() == CgroupLayout::V1 { "" } else { "0::" };
        let place = running.says(tracked_by);
        assert!(place.contains("gpupool") && place.contains("lease-"), "the command is in {place:?}");
    } else {
        skipped(STORY, &CgroupManager::detect().describe());
    }
    let command = Watched::of(&running.says("pid "));
    let lease = the_active(&agent.client_unix()).await;
    assert_eq!((lease.owner.as_str(), lease.holder), ("nobody", Some(HolderBody::Process { pid: running.pid() })));

    running.signal(Signal::KILL);
    command.expect_end();
    assert_eq!(run(&agent, &[], &["true"]).code(), 0);
    assert_eq!(over(&agent.client_unix(), lease.id).await.0, LeaseState::Released);

    if CgroupManager::detect().limits_memory() {
        let mut line = as_nobody(BINARY);
        line.args(["run", "--endpoint", &endpoint, "--host-memory", "128MiB", "--", "python3", "-c", HOG]);
        let (code, _, messages) = Running::start(line).ended();
        assert_eq!(code, 137, "{messages}");
        assert!(
            messages.contains("control group of the agent") && messages.contains("more than 128 MiB"),
            "{messages}"
        );
    }
}
