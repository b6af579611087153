//! Callers and their rights.

use std::sync::Arc;

/// The rights of a caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// May read public information.
    Reader,
    /// May read what a user of this machine may read.
    ReadOnly,
    /// May take leases and change its own.
    User,
    /// May change every lease and every device.
    Admin,
}

/// The prefix of owners without proof of identity. No identified owner has it. The address of the caller follows, and after
/// a slash, which no address contains, the name that the caller chose: `anonymous:192.0.2.7/alice`.
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

    /// Returns an anonymous caller at an address. Callers at the same address share their leases.
    pub(crate) fn anonymous(address: &str) -> Self {
        Self { owner: format!("{ANONYMOUS}:{address}").into(), role: Role::User, uid: None }
    }

    /// Whether it is a user of this machine, identified or not.
    pub(crate) fn is_local(&self) -> bool {
        self.uid.is_some() || self.owner.strip_prefix(ANONYMOUS).is_some_and(|rest| rest == ":local")
    }

    /// Whether it is known by its address only.
    pub(crate) fn is_anonymous(&self) -> bool {
        self.uid.is_none() && self.owner.strip_prefix(ANONYMOUS).is_some_and(|rest| rest.starts_with(':'))
    }

    /// Whether it may change leases of this owner. An anonymous caller may change those under any name from its address.
    pub(crate) fn may_act_for(&self, owner: &str) -> bool {
        match self.role {
            Role::Admin => true,
            Role::User => *self.owner == *owner || self.is_anonymous() && is_name_at(owner, &self.owner),
            Role::Reader | Role::ReadOnly => false,
        }
    }
}

/// Whether an anonymous owner chose a name at the address of another.
fn is_name_at(owner: &str, address: &str) -> bool {
    owner.strip_prefix(address).is_some_and(|rest| rest.starts_with('/'))
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
        assert!(!caller("alice", Role::ReadOnly).may_act_for("alice"));
    }

    #[test]
    fn anonymous_callers_act_only_for_names_at_their_own_address() {
        let at = |address: &str| Caller::anonymous(address);
        for owner in ["anonymous:192.0.2.7", "anonymous:192.0.2.7/bob"] {
            assert!(at("192.0.2.7").may_act_for(owner), "{owner}");
            assert!(!at("192.0.2.70").may_act_for(owner) && !at("192.0.2").may_act_for(owner), "{owner}");
        }
        for owner in ["anonymous", "anonymous:bob", "anonymous:192.0.2.8/192.0.2.7", "192.0.2.7", "bob"] {
            assert!(!at("192.0.2.7").may_act_for(owner), "{owner}");
        }
        assert!(!at("fe80::1").may_act_for("anonymous:fe80::1:2"));
        let account = Caller { owner: "anonymous:a".into(), role: Role::User, uid: Some(7) };
        assert!(!account.may_act_for("anonymous:a/bob"), "a caller with a uid is not anonymous");
    }
}
