//! Following leases: being asked for keeps a lease in the queue, also while the answer is waited for.

use gpupool_api::lease::Followed;
use gpupool_core::lease::LeaseState;
use gpupool_core::{Command, LeaseId, Outcome, Time};

use crate::limits::FOLLOW_EVERY;

use super::calls::{Call, Patience};
use super::{OwnerThread, Refusal, StoreState, lease_body};

impl OwnerThread {
    /// Keeps those in the queue that a call asks for.
    pub(super) fn keep_followed(&mut self, call: &Call, outcome: &mut Outcome) {
        if self.is_broken() {
            return;
        }
        for &lease in call.leases.iter() {
            let known = self.pool.lease(lease).filter(|known| known.state == LeaseState::Queued);
            if known.is_some_and(|known| call.caller.may_act_for(&known.request.owner)) {
                self.apply(Command::Follow { lease }, outcome).ok();
            }
        }
    }

    /// Keeps those in the queue whom somebody waits for right now.
    pub(super) fn follow_awaited(&mut self, outcome: &mut Outcome) {
        if self.waiters.calls.is_empty() || self.at.pool < self.follow_due() {
            return;
        }
        self.followed = self.at.pool;
        for lease in self.waiters.calls.awaited() {
            self.apply(Command::Follow { lease }, outcome).ok();
        }
    }

    /// When those whom somebody waits for are to be kept in the queue again.
    pub(super) fn follow_due(&self) -> Time {
        self.followed.after(FOLLOW_EVERY)
    }

    /// Answers those who follow what left the queue, and those who just asked where there is something to tell.
    pub(super) fn tell_followers(&mut self, asked: Vec<Call>) {
        let woken = self.waiters.calls.take_woken();
        for call in woken.into_iter().chain(asked) {
            self.tell_or_wait(call);
        }
    }

    fn tell_or_wait(&mut self, call: Call) {
        if call.reply.is_closed() {
            return;
        }
        if let StoreState::Broken(why) = &self.store_state {
            return call.tell(Err(Refusal::NotDurable(why.clone())));
        }
        let followed = self.news_of(&call);
        let is_news = !followed.changed.is_empty() || !followed.unknown.is_empty();
        if is_news || call.patience == Patience::None {
            call.tell(Ok(followed));
        } else {
            self.waiters.calls.add(call);
        }
    }

    /// What there is to tell of the leases of a call.
    fn news_of(&self, call: &Call) -> Followed {
        let mut followed = Followed::default();
        for &LeaseId(id) in call.leases.iter() {
            let known = self.pool.lease(LeaseId(id));
            match known.filter(|known| call.caller.may_act_for(&known.request.owner)) {
                None => followed.unknown.push(id),
                Some(known) if known.state == LeaseState::Queued => {}
                Some(known) => followed.changed.push(lease_body(self, known, Some(&call.caller))),
            }
        }
        followed
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::SystemTime;

    use gpupool_api::RequestBody;
    use gpupool_api::lease::State;
    use gpupool_core::device::{DeviceFacts, DeviceIdentity, IsolationSupport, NodeFacts, Vendor};
    use gpupool_core::limits::WAITER_PATIENCE;
    use gpupool_core::policy::Policies;
    use gpupool_core::reading::Reading;
    use gpupool_core::{Bytes, DeviceId, MilliCpus, Millis, Request, Settings};
    use gpupool_store::{Clock, LoadedRows, SqliteStore};
    use tokio::sync::{mpsc, oneshot};

    use super::*;
    use crate::events::Events;
    use crate::identity::{Caller, Role};
    use crate::metrics::Metrics;
    use crate::owner::message::{Asked, Fact, Message};
    use crate::owner::{OwnerSpec, Reply};
    use crate::watching::Watching;

    type Answer = oneshot::Receiver<Result<Followed, Refusal>>;

    /// The owner without its thread, on a clock of the test's own, with one GPU.
    struct Stage {
        owner: OwnerThread,
        now: Time,
        _folder: tempfile::TempDir,
    }

    impl Stage {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let (leaves, _) = mpsc::unbounded_channel();
            let watching = Watching::new(Arc::new(Events::new("run".into())), Arc::new(Metrics::new()), None, leaves);
            let labels = Default::default();
            let node = NodeFacts { name: "node".into(), cpus: MilliCpus(1000), memory: Bytes::ZERO, labels };
            let spec = OwnerSpec {
                store: Box::new(SqliteStore::open(folder.path()).unwrap()),
                loaded: LoadedRows::default(),
                settings: Settings::default(),
                policies: Policies::unlimited(),
                node: node.clone(),
                waiters_per_owner: 1_000,
                real_processes: false,
                watcher: watching.watcher(),
            };
            let now = Time(1_000_000);
            let (owner, complaints) = OwnerThread::new(spec, Clock { pool: now, wall: SystemTime::now() });
            assert!(complaints.is_empty(), "{complaints:?}");
            let mut stage = Self { owner, now, _folder: folder };
            let device = DeviceFacts {
                identity: DeviceIdentity::Uuid("GPU-0".into()),
                vendor: Vendor::Nvidia,
                model: "GPU".into(),
                memory: None,
                partition: None,
                isolation: IsolationSupport::BASIC,
                labels: Default::default(),
            };
            stage.fact(Command::NodeSeen { facts: node, devices: vec![device], numbers: Vec::new() });
            stage.fact(Command::Observe { device: DeviceId(0), reading: Reading::idle(now) });
            stage
        }

        fn hear(&mut self, batch: Vec<Message>) {
            self.owner.process_at(Clock { pool: self.now, wall: SystemTime::now() }, batch);
        }

        fn fact(&mut self, command: Command) {
            self.hear(vec![Message::Fact(Fact { command, held_by: None })]);
        }

        /// Time passes, as the thread would notice it while nothing is asked.
        fn pass(&mut self, millis: Millis) {
            for _ in 0..millis.0 / 1000 {
                self.now = self.now.after(Millis(1000));
                self.hear(Vec::new());
            }
        }

        /// Takes the GPU.
        fn take(&mut self) -> LeaseId {
            let lease = self.ask("alice");
            assert_eq!(self.state(lease), LeaseState::Active, "{:?}", self.owner.pool.explain(lease));
            lease
        }

        fn ask(&mut self, owner: &str) -> LeaseId {
            let body = RequestBody { owner: Some(owner.into()), ttl_secs: Some(3600.0), ..RequestBody::default() };
            let command = Command::Request { request: Arc::new(Request::try_from(body).unwrap()), key: None };
            let (reply, mut answer) = oneshot::channel();
            self.hear(vec![Message::Asked(Asked { command, caller: user(owner), reply })]);
            match answer.try_recv().unwrap() {
                Ok(Reply::Lease(lease)) => LeaseId(lease.id),
                other => panic!("{other:?}"),
            }
        }

        fn follow(&mut self, who: &str, leases: &[LeaseId], patience: Patience) -> Answer {
            let (reply, answer) = oneshot::channel();
            self.hear(vec![Message::Follow(Call { caller: user(who), leases: leases.into(), patience, reply })]);
            answer
        }

        fn state(&self, lease: LeaseId) -> LeaseState {
            self.owner.pool.lease(lease).unwrap().state
        }
    }

    fn user(owner: &str) -> Caller {
        Caller { owner: owner.into(), role: Role::User, uid: None }
    }

    fn told(answer: &mut Answer) -> Followed {
        answer.try_recv().expect("an answer").expect("no refusal")
    }

    #[test]
    fn a_call_keeps_all_its_leases_in_the_queue_while_it_waits_and_no_longer() {
        let mut stage = Stage::new();
        stage.take();
        let waiting: Vec<LeaseId> = (0..100).map(|_| stage.ask("alice")).collect();
        let alone = stage.ask("alice");
        let mut answer = stage.follow("alice", &waiting, Patience::UntilChanged);
        stage.pass(Millis(10 * WAITER_PATIENCE.0));
        assert_eq!(stage.state(alone), LeaseState::Expired, "nobody asked for it");
        assert!(waiting.iter().all(|lease| stage.state(*lease) == LeaseState::Queued));
        assert!(answer.try_recv().is_err(), "there was nothing to tell");
        drop(answer);
        stage.pass(Millis(2 * WAITER_PATIENCE.0));
        assert!(waiting.iter().all(|lease| stage.state(*lease) == LeaseState::Expired), "whoever asked went away");
        assert!(stage.owner.waiters.calls.is_empty());
    }

    #[test]
    fn an_answer_at_once_keeps_them_too() {
        let mut stage = Stage::new();
        stage.take();
        let waiting = [stage.ask("alice"), stage.ask("alice")];
        for _ in 0..5 {
            stage.pass(Millis(WAITER_PATIENCE.0 - 1000));
            assert_eq!(told(&mut stage.follow("alice", &waiting, Patience::None)), Followed::default());
        }
    }

    #[test]
    fn what_leaves_the_queue_together_is_told_together_and_in_the_order_asked_for() {
        let mut stage = Stage::new();
        let held = stage.take();
        let [first, second, third] = std::array::from_fn(|_| stage.ask("alice"));
        let mut answer = stage.follow("alice", &[third, second, first], Patience::UntilChanged);
        let release = |lease| Message::Fact(Fact { command: Command::Release { lease }, held_by: None });
        stage.hear(vec![release(held), release(third)]);
        let followed = told(&mut answer);
        let seen: Vec<_> = followed.changed.iter().map(|lease| (LeaseId(lease.id), lease.state)).collect();
        assert_eq!(seen, [(third, State::Released), (first, State::Active)]);
        assert!(followed.changed[1].token.is_some() && followed.unknown.is_empty());
        assert!(stage.owner.waiters.calls.is_empty(), "who was told waits no longer");
    }

    #[test]
    fn what_is_not_the_callers_is_unknown_and_not_kept() {
        let mut stage = Stage::new();
        stage.take();
        let (hers, his) = (stage.ask("alice"), stage.ask("bob"));
        for _ in 0..3 {
            stage.pass(Millis(WAITER_PATIENCE.0 / 2));
            let never = LeaseId(999);
            let followed = told(&mut stage.follow("alice", &[never, hers, his], Patience::UntilChanged));
            assert_eq!((followed.changed, followed.unknown), (Vec::new(), vec![never.0, his.0]));
        }
        assert_eq!((stage.state(hers), stage.state(his)), (LeaseState::Queued, LeaseState::Expired));
    }

    #[test]
    fn while_nothing_can_be_trusted_nothing_is_told() {
        let mut stage = Stage::new();
        stage.take();
        let waiting = [stage.ask("alice")];
        let mut before = stage.follow("alice", &waiting, Patience::UntilChanged);
        stage.owner.store_state = StoreState::Broken("it broke".into());
        let refused = Ok(Err(Refusal::NotDurable("it broke".into())));
        assert_eq!(stage.follow("alice", &waiting, Patience::UntilChanged).try_recv(), refused);
        assert_eq!(before.try_recv(), Err(oneshot::error::TryRecvError::Empty));
        // The pool that stands in has no leases.
        stage.owner.pool = gpupool_core::Pool::default();
        stage.owner.take_stock();
        stage.hear(Vec::new());
        assert_eq!(before.try_recv(), refused);
    }
}
