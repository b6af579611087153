//! Callers and their rights.

use std::sync::Arc;

/// The rights of a caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// May read public information.
    Reader,
    /// May take leases and change its own.
    User,
    /// May change every lease and every device.
    Admin,
}

/// The prefix of owners without proof of identity. No identified owner has it.
pub const ANONYMOUS: &str = "anonymous";

/// The sender of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Caller {
    /// The owner of the leases that it takes.
    pub owner: Arc<str>,
    /// Its rights.
    pub role: Role,
    /// Its user id, if the kernel confirms it.
    pub uid: Option<u32>,
}

impl Caller {
    /// Returns a caller from the network without a token.
    pub(crate) fn reader() -> Self {
        Self { owner: ANONYMOUS.into(), role: Role::Reader, uid: None }
    }

    /// Returns the agent itself.
    pub(crate) fn agent() -> Self {
        Self { owner: "gpupool".into(), role: Role::Admin, uid: None }
    }

    /// Whether it may change leases of this owner. Anonymous callers share their leases.
    pub(crate) fn may_act_for(&self, owner: &str) -> bool {
        match self.role {
            Role::Admin => true,
            Role::User => *self.owner == *owner || (is_anonymous(&self.owner) && is_anonymous(owner)),
            Role::Reader => false,
        }
    }
}

fn is_anonymous(owner: &str) -> bool {
    owner.strip_prefix(ANONYMOUS).is_some_and(|rest| rest.is_empty() || rest.starts_with(':'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_act_for_themselves_admins_for_all_and_readers_for_none() {
        let caller = |owner: &str, role| Caller { owner: owner.into(), role, uid: None };
        assert!(caller("alice", Role::User).may_act_for("alice"));
        assert!(!caller("alice", Role::User).may_act_for("bob"));
        assert!(caller("root", Role::Admin).may_act_for("bob"));
        assert!(!caller("alice", Role::Reader).may_act_for("alice"));
        assert!(caller("anonymous:a", Role::User).may_act_for("anonymous:b"));
        assert!(!caller("anonymously", Role::User).may_act_for("anonymous"));
    }
}
