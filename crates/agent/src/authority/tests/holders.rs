//! After any sequence of requests and reports, a granted lease has a holder that its node watches, or a ttl.

use proptest::prelude::*;

use super::*;

#[derive(Debug, Clone)]
enum HolderStep {
    Request,
    Attach { lease: usize, pid: u32, is_stale: bool },
    AttachConnection { lease: usize },
    AttachCgroup { lease: usize },
    Renew { lease: usize },
    HolderGone { lease: usize },
    Release { lease: usize },
    Drained { lease: usize },
    Pass { secs: u64 },
    Restart,
}

fn step() -> impl Strategy<Value = HolderStep> {
    let lease = 0..4_usize;
    prop_oneof![
        3 => Just(HolderStep::Request),
        3 => (lease.clone(), 1..4_u32, any::<bool>())
            .prop_map(|(lease, pid, is_stale)| HolderStep::Attach { lease, pid, is_stale }),
        1 => lease.clone().prop_map(|lease| HolderStep::AttachConnection { lease }),
        1 => lease.clone().prop_map(|lease| HolderStep::AttachCgroup { lease }),
        1 => lease.clone().prop_map(|lease| HolderStep::Renew { lease }),
        2 => lease.clone().prop_map(|lease| HolderStep::HolderGone { lease }),
        2 => lease.clone().prop_map(|lease| HolderStep::Release { lease }),
        1 => lease.prop_map(|lease| HolderStep::Drained { lease }),
        1 => (1..20_u64).prop_map(|secs| HolderStep::Pass { secs }),
        1 => Just(HolderStep::Restart),
    ]
}

/// Takes a step, and returns the stage after it.
fn take_step(mut stage: AuthorityStage, leases: &mut Vec<LeaseBody>, step: &HolderStep) -> AuthorityStage {
    let known = |lease: &usize| leases.get(leases.len().wrapping_sub(lease + 1)).cloned();
    let attach_to = |stage: &mut AuthorityStage, lease: &usize, holder, is_stale| {
        let Some(lease) = known(lease) else { return };
        let token = stage.authority.pool().lease(LeaseId(lease.id)).and_then(|known| known.token);
        let token = token.map_or(0, |token| token.0 + u64::from(is_stale));
        stage.receive(vec![attach(&lease, token, holder).0]);
    };
    let send = |stage: &mut AuthorityStage,
                lease: &usize,
                message: &dyn Fn(LeaseId, &AuthorityStage) -> Option<AuthorityMessage>| {
        let message = known(lease).and_then(|lease| message(LeaseId(lease.id), stage));
        stage.receive(message.into_iter().collect());
    };
    match step {
        HolderStep::Request => leases.extend(match stage.try_request("alice") {
            Ok(Reply::Lease(lease)) => Some(*lease),
            _ => None,
        }),
        HolderStep::Attach { lease, pid, is_stale } => {
            attach_to(&mut stage, lease, LeaseHolder::Process { pid: *pid, started: 1 }, *is_stale);
        }
        HolderStep::AttachConnection { lease } => attach_to(&mut stage, lease, LeaseHolder::Connection, false),
        HolderStep::AttachCgroup { lease } => {
            attach_to(&mut stage, lease, LeaseHolder::Cgroup("/jobs/1".into()), false)
        }
        HolderStep::Renew { lease } => send(&mut stage, lease, &|lease, stage| {
            let token = stage.authority.pool().lease(lease)?.token?;
            Some(asked("alice", PoolCommand::Renew { lease, token }).0)
        }),
        HolderStep::HolderGone { lease } => send(&mut stage, lease, &|lease, stage| {
            let holder = stage.authority.pool().lease(lease)?.holder.clone()?;
            Some(AuthorityMessage::Report(NodeReport::HolderGone { lease, holder }))
        }),
        HolderStep::Release { lease } => {
            send(&mut stage, lease, &|lease, _| Some(asked("alice", PoolCommand::Release { lease }).0))
        }
        HolderStep::Drained { lease } => {
            send(&mut stage, lease, &|lease, _| Some(AuthorityMessage::Report(NodeReport::Drained { lease })));
        }
        HolderStep::Pass { secs } => stage.pass(Millis(secs * 1_000)),
        HolderStep::Restart => {
            stage = stage.restarted();
            let orders = stage.node.take_orders();
            let Some(NodeOrder::Fence { leases: fenced }) = orders.first() else { panic!("no fence: {orders:?}") };
            for lease in stage.authority.pool().leases().filter(|lease| lease.state.is_granted()) {
                let watched = fenced.iter().find(|fenced| fenced.lease == lease.id).map(|fenced| &fenced.holder);
                assert_eq!(watched, Some(&lease.holder), "{lease:?}");
            }
            stage.sample(DeviceReading::idle(stage.now));
        }
    }
    stage
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn a_granted_lease_has_a_holder_with_a_watch_or_a_ttl(steps in prop::collection::vec(step(), 1..40)) {
        let (mut stage, mut leases) = (AuthorityStage::new(), Vec::new());
        for step in &steps {
            stage = take_step(stage, &mut leases, step);
            for lease in stage.authority.pool().leases().filter(|lease| lease.state.is_granted()) {
                prop_assert!(lease.holder.is_some() || lease.expires_at.is_some(), "{step:?}: {lease:?}");
            }
        }
    }
}
