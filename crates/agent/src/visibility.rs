//! Details about processes that a caller may see.
//!
//! Command lines contain data sets, paths and sometimes passwords, and pids and control groups help an attacker on the
//! machine. The network needs neither to see why a GPU is taken.

use gpupool_api::lease::HolderBody;
use gpupool_api::pool::ProcessBody;

use crate::identity::{Caller, Role};

/// The details about a process that a caller may see. Names of users and owners are always visible.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProcessDetail {
    /// Command line, pid and control group.
    Full,
    /// The name of the program.
    ProgramName,
}

impl ProcessDetail {
    /// Returns the details that a caller may see of a process, given the owner of the lease that it belongs to.
    pub(crate) fn of(caller: &Caller, lease_owner: Option<&str>) -> Self {
        let is_owner = || lease_owner.is_some_and(|owner| caller.may_act_for(owner));
        let reads_all = matches!(caller.role, Role::Admin | Role::ReadOnly) || caller.is_local();
        if reads_all || is_owner() { Self::Full } else { Self::ProgramName }
    }

    /// Removes the details of a process that are not visible.
    pub(crate) fn limit_process(self, process: &mut ProcessBody) {
        if self == Self::ProgramName {
            process.pid = None;
            process.command = process.command.as_deref().map(|command| program_name(command).to_owned());
        }
    }

    /// Removes the details of a lease's holder that are not visible.
    pub(crate) fn limit_holder(self, holder: &mut HolderBody) {
        if self == Self::ProgramName {
            match holder {
                HolderBody::Process { pid } => *pid = None,
                HolderBody::Cgroup { path } => *path = None,
                HolderBody::Connection => {}
            }
        }
    }
}

/// Returns the file name of the program in a command line.
fn program_name(command: &str) -> &str {
    let program = command.split_whitespace().next().unwrap_or_default();
    program.rsplit('/').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_administrators_and_local_users_see_everything_and_the_network_sees_programs() {
        use ProcessDetail::{Full, ProgramName};
        let caller = |owner: &str, role, uid| Caller { owner: owner.into(), role, uid };
        // The details of a process without a lease, under alice's lease, and under the lease of an anonymous owner.
        for (name, caller, expected) in [
            ("the agent's user", caller("root", Role::Admin, Some(0)), [Full, Full, Full]),
            ("an administrator's token", caller("ops", Role::Admin, None), [Full, Full, Full]),
            ("a read-only token", caller("grafana", Role::ReadOnly, None), [Full, Full, Full]),
            ("a local user", caller("bob", Role::User, Some(1001)), [Full, Full, Full]),
            ("an unidentified local user", Caller::anonymous("local"), [Full, Full, Full]),
            ("alice's token", caller("alice", Role::User, None), [ProgramName, Full, ProgramName]),
            ("bob's token", caller("bob", Role::User, None), [ProgramName, ProgramName, ProgramName]),
            ("the same address", Caller::anonymous("192.0.2.7"), [ProgramName, ProgramName, Full]),
            ("another address", Caller::anonymous("192.0.2.8"), [ProgramName, ProgramName, ProgramName]),
            ("the network", Caller::reader(), [ProgramName, ProgramName, ProgramName]),
        ] {
            let owners = [None, Some("alice"), Some("anonymous:192.0.2.7/x")];
            assert_eq!(owners.map(|owner| ProcessDetail::of(&caller, owner)), expected, "{name}");
        }
    }

    #[test]
    fn a_limited_process_keeps_its_program_its_user_and_its_use() {
        let process = |pid, command: &str| ProcessBody {
            pid,
            user: Some("alice".into()),
            command: Some(command.into()),
            memory_mib: Some(1024),
            lease: Some(7),
            squatter: false,
        };
        for (command, program) in [
            ("/home/alice/venv/bin/python train.py --password=x", "python"),
            ("python", "python"),
            ("[kworker]", "[kworker]"),
            ("./secret/", ""),
            ("", ""),
        ] {
            let mut seen = process(Some(42), command);
            ProcessDetail::ProgramName.limit_process(&mut seen);
            assert_eq!(seen, process(None, program));
            let mut full = process(Some(42), command);
            ProcessDetail::Full.limit_process(&mut full);
            assert_eq!(full, process(Some(42), command));
        }
    }

    #[test]
    fn a_limited_holder_keeps_its_kind() {
        for (holder, limited) in [
            (HolderBody::Process { pid: Some(42) }, HolderBody::Process { pid: None }),
            (HolderBody::Cgroup { path: Some("/job".into()) }, HolderBody::Cgroup { path: None }),
            (HolderBody::Connection, HolderBody::Connection),
        ] {
            let (mut full, mut seen) = (holder.clone(), holder.clone());
            ProcessDetail::Full.limit_holder(&mut full);
            ProcessDetail::ProgramName.limit_holder(&mut seen);
            assert_eq!((full, seen), (holder, limited));
        }
    }
}
