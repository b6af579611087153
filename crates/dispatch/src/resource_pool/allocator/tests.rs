use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn rules(min_workers: usize, max_workers: usize) -> PoolRules {
    PoolRules {
        min_workers,
        max_workers,
        acquire_patience: 30 * SECOND,
        worker_timeout: 10 * SECOND,
        idle_time: 60 * SECOND,
        waits_for_devices: false,
    }
}

/// Simulated processes and waiters: applies effects and rejects impossible ones.
struct AllocatorSimulation {
    allocator: WorkerAllocator,
    rules: PoolRules,
    now: Instant,
    slots: Vec<SimulatedProcess>,
    /// Slots whose process is about to exit.
    dying: BTreeSet<usize>,
    /// Waiters in order of arrival.
    waiters: VecDeque<u64>,
    holds: BTreeSet<u64>,
    refused: Vec<(u64, AcquireRefusal)>,
    next: u64,
    is_closed: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SimulatedProcess {
    None,
    Starting,
    Alive(Option<u64>),
    /// Ordered to exit, possibly while held.
    Ending(Option<u64>),
}

impl AllocatorSimulation {
    fn new(rules: PoolRules) -> Self {
        let slots = vec![SimulatedProcess::None; rules.max_workers];
        let (waiters, holds, refused, dying) = (VecDeque::new(), BTreeSet::new(), Vec::new(), BTreeSet::new());
        let (allocator, now) = (WorkerAllocator::new(rules), Instant::now());
        let mut simulation =
            Self { allocator, rules, now, slots, dying, waiters, holds, refused, next: 0, is_closed: false };
        simulation.step(|allocator, now, effects| allocator.advance_time(now, effects));
        simulation
    }

    fn step<T>(&mut self, happens: impl FnOnce(&mut WorkerAllocator, Instant, &mut Vec<AllocatorEffect>) -> T) -> T {
        let mut effects = Vec::new();
        let result = happens(&mut self.allocator, self.now, &mut effects);
        effects.into_iter().for_each(|effect| self.apply_effect(effect));
        result
    }

    fn apply_effect(&mut self, effect: AllocatorEffect) {
        match effect {
            AllocatorEffect::Start(index) => {
                assert_eq!(self.slots[index], SimulatedProcess::None, "slot {index} has a process already");
                self.slots[index] = SimulatedProcess::Starting;
            }
            AllocatorEffect::Grant { ticket, slot } => {
                assert_eq!(self.waiters.pop_front(), Some(ticket.0), "the oldest waiter is not first");
                assert_eq!(self.slots[slot], SimulatedProcess::Alive(None), "slot {slot} is not free");
                assert!(!self.dying.contains(&slot), "the process of slot {slot} is dying");
                self.slots[slot] = SimulatedProcess::Alive(Some(ticket.0));
                assert!(self.holds.insert(ticket.0));
            }
            AllocatorEffect::Refuse { ticket, why } => {
                let index = self.waiters.iter().position(|waiter| *waiter == ticket.0);
                self.waiters.remove(index.unwrap_or_else(|| panic!("{ticket:?} does not wait")));
                self.refused.push((ticket.0, why));
            }
            AllocatorEffect::HoldTimedOut { ticket, slot } => {
                let (SimulatedProcess::Alive(holder) | SimulatedProcess::Ending(holder)) = self.slots[slot] else {
                    panic!("no process")
                };
                assert_eq!(holder, Some(ticket.0));
                assert!(self.holds.remove(&ticket.0));
                self.slots[slot] = SimulatedProcess::Ending(None);
            }
            AllocatorEffect::Stop(slot) => {
                let SimulatedProcess::Alive(holder) = self.slots[slot] else {
                    panic!("{:?} is stopped", self.slots[slot])
                };
                assert!(holder.is_none() || self.is_closed, "the worker has a holder");
                self.slots[slot] = SimulatedProcess::Ending(holder);
            }
            AllocatorEffect::Kill(slot) => {
                assert_ne!(self.slots[slot], SimulatedProcess::None, "slot {slot} has no process to kill");
                self.slots[slot] = SimulatedProcess::Ending(None);
            }
        }
    }

    fn enqueue(&mut self) -> u64 {
        let ticket = self.next;
        self.next += 1;
        self.waiters.push_back(ticket);
        self.step(|allocator, now, effects| allocator.enqueue(AcquireTicket(ticket), now, effects));
        ticket
    }

    fn cancel_wait(&mut self, ticket: u64) {
        self.waiters.retain(|waiter| *waiter != ticket);
        self.allocator.cancel_wait(AcquireTicket(ticket));
    }

    fn release_worker(&mut self, ticket: u64, condition: WorkerCondition) {
        let was_held = self.holds.remove(&ticket);
        for process in &mut self.slots {
            match process {
                SimulatedProcess::Alive(holder) if *holder == Some(ticket) => *process = SimulatedProcess::Alive(None),
                SimulatedProcess::Ending(holder) if *holder == Some(ticket) => {
                    *process = SimulatedProcess::Ending(None)
                }
                _ => {}
            }
        }
        let ended = self
            .step(|allocator, now, effects| allocator.release_worker(AcquireTicket(ticket), condition, now, effects));
        assert_eq!(ended, was_held);
    }

    fn mark_ready(&mut self, slot: usize) {
        self.slots[slot] = SimulatedProcess::Alive(None);
        self.step(|allocator, now, effects| allocator.mark_ready(slot, now, effects));
    }

    fn mark_dying(&mut self, slot: usize) {
        self.dying.insert(slot);
        self.allocator.mark_dying(slot);
    }

    fn process_gone(&mut self, slot: usize, failure: Option<Arc<str>>) {
        self.dying.remove(&slot);
        let holder = match std::mem::replace(&mut self.slots[slot], SimulatedProcess::None) {
            SimulatedProcess::Alive(holder) | SimulatedProcess::Ending(holder) => holder,
            _ => None,
        };
        if let Some(holder) = holder {
            self.holds.remove(&holder);
        }
        let ended_hold = self.step(|allocator, now, effects| allocator.process_gone(slot, failure, now, effects));
        assert_eq!(ended_hold, holder.map(AcquireTicket));
    }

    fn advance_time(&mut self, time: Duration) {
        self.now += time;
        self.step(|allocator, now, effects| allocator.advance_time(now, effects));
    }

    fn mark_all_ready(&mut self) {
        for slot in 0..self.slots.len() {
            if self.slots[slot] == SimulatedProcess::Starting {
                self.mark_ready(slot);
            }
        }
    }

    fn free_count(&self) -> usize {
        let is_free =
            |index: &usize| self.slots[*index] == SimulatedProcess::Alive(None) && !self.dying.contains(index);
        (0..self.slots.len()).filter(is_free).count()
    }

    /// Invariants that hold at any moment.
    fn check_invariants(&self) {
        let counts = self.allocator.status();
        assert_eq!((counts.waiting_tasks, counts.active_tasks), (self.waiters.len(), self.holds.len()));
        assert!(counts.total_workers <= self.rules.max_workers);
        if self.is_closed {
            return assert!(self.waiters.is_empty());
        }
        assert_eq!(counts.available_workers, self.free_count());
        assert!(counts.total_workers >= self.rules.min_workers, "{counts:?}");
        assert!(self.waiters.is_empty() || counts.available_workers == 0, "a request waits while a worker is free");
        let has_process = self.slots.iter().any(|process| *process != SimulatedProcess::None);
        let has_deadline = self.allocator.next_deadline().is_some();
        assert!(
            self.waiters.is_empty() || has_process || has_deadline,
            "a waiter has neither a process nor a deadline ahead"
        );
    }
}

fn failure(why: &str) -> Option<Arc<str>> {
    Some(why.into())
}

#[test]
fn workers_start_with_load_and_stop_when_idle() {
    let mut simulation = AllocatorSimulation::new(rules(1, 3));
    simulation.mark_all_ready();
    let tickets: Vec<u64> = (0..5).map(|_| simulation.enqueue()).collect();
    assert_eq!(
        simulation.slots,
        [SimulatedProcess::Alive(Some(0)), SimulatedProcess::Starting, SimulatedProcess::Starting]
    );
    simulation.mark_all_ready();
    for ticket in tickets {
        simulation.release_worker(ticket, WorkerCondition::Reusable);
    }
    assert_eq!(
        simulation.allocator.status(),
        ResourcePoolStatus { total_workers: 3, available_workers: 3, ..ResourcePoolStatus::default() }
    );
    simulation.advance_time(59 * SECOND);
    assert_eq!(simulation.free_count(), 3);
    simulation.advance_time(SECOND);
    assert_eq!(
        simulation.slots,
        [SimulatedProcess::Alive(None), SimulatedProcess::Ending(None), SimulatedProcess::Ending(None)]
    );
    simulation.process_gone(1, None);
    simulation.process_gone(2, None);
    assert_eq!(simulation.allocator.status().total_workers, 1);
    assert_eq!(simulation.allocator.next_deadline(), None);
}

#[test]
fn a_waiter_times_out_and_a_cancelled_waiter_is_skipped() {
    let mut simulation = AllocatorSimulation::new(rules(1, 1));
    simulation.mark_all_ready();
    let tickets: Vec<u64> = (0..4).map(|_| simulation.enqueue()).collect();
    simulation.cancel_wait(tickets[1]);
    simulation.advance_time(9 * SECOND);
    simulation.release_worker(tickets[0], WorkerCondition::Reusable);
    assert_eq!(simulation.holds, BTreeSet::from([tickets[2]]));
    simulation.advance_time(10 * SECOND);
    assert!(simulation.holds.is_empty(), "the hold timed out");
    simulation.advance_time(11 * SECOND);
    assert_eq!(simulation.refused, [(tickets[3], AcquireRefusal::TimedOut)]);
}

#[test]
fn an_unusable_worker_is_replaced_before_the_next_grant() {
    let mut simulation = AllocatorSimulation::new(rules(1, 1));
    simulation.mark_all_ready();
    let (first, second) = (simulation.enqueue(), simulation.enqueue());
    simulation.release_worker(first, WorkerCondition::Unusable);
    assert_eq!(simulation.slots, [SimulatedProcess::Ending(None)]);
    simulation.process_gone(0, None);
    assert_eq!(simulation.slots, [SimulatedProcess::Starting]);
    simulation.mark_ready(0);
    assert_eq!(simulation.holds, BTreeSet::from([second]));
}

#[test]
fn start_failures_refuse_waiters_and_are_retried_with_backoff() {
    let mut simulation = AllocatorSimulation::new(rules(1, 4));
    let ticket = simulation.enqueue();
    let mut starts = 0;
    while simulation.refused.is_empty() {
        let slot = simulation.slots.iter().position(|process| *process == SimulatedProcess::Starting);
        match slot {
            Some(slot) => (starts, _) = (starts + 1, simulation.process_gone(slot, failure("no model"))),
            None => simulation.advance_time(Duration::from_millis(50)),
        }
        simulation.check_invariants();
        assert!(starts < 50);
    }
    assert_eq!(simulation.refused, [(ticket, AcquireRefusal::NoWorker("no model".into()))]);
    assert!(simulation.allocator.unavailable_reason().is_some());
    simulation.advance_time(2 * SECOND);
    simulation.enqueue();
    let slot = simulation.slots.iter().position(|process| *process == SimulatedProcess::Starting).unwrap();
    simulation.mark_ready(slot);
    assert_eq!((simulation.holds.len(), simulation.allocator.unavailable_reason()), (1, None));
}

#[test]
fn a_slot_that_always_fails_leaves_its_work_to_the_others() {
    let mut simulation = AllocatorSimulation::new(rules(1, 2));
    simulation.enqueue();
    simulation.process_gone(0, failure("broken"));
    assert_eq!(simulation.slots[1], SimulatedProcess::Starting);
    simulation.mark_ready(1);
    assert_eq!(simulation.holds.len(), 1);
}

#[derive(Debug, Clone)]
enum AllocatorStep {
    Enqueue,
    CancelWait(usize),
    Release(usize, bool),
    Ready(usize),
    Dying(usize),
    Gone(usize, bool),
    AdvanceTime(u64),
    Close,
}

fn step() -> impl Strategy<Value = AllocatorStep> {
    prop_oneof![
        6 => Just(AllocatorStep::Enqueue),
        2 => any::<usize>().prop_map(AllocatorStep::CancelWait),
        4 => (any::<usize>(), any::<bool>()).prop_map(|(which, is_fit)| AllocatorStep::Release(which, is_fit)),
        6 => any::<usize>().prop_map(AllocatorStep::Ready),
        2 => any::<usize>().prop_map(AllocatorStep::Dying),
        4 => (any::<usize>(), any::<bool>()).prop_map(|(which, failed_alone)| AllocatorStep::Gone(which, failed_alone)),
        3 => (0_u64..40_000).prop_map(AllocatorStep::AdvanceTime),
        1 => Just(AllocatorStep::Close),
    ]
}

/// Returns the `which`-th of the candidates.
fn choose<T: Clone>(from: Vec<T>, which: usize) -> Option<T> {
    (!from.is_empty()).then(|| from[which % from.len()].clone())
}

impl AllocatorSimulation {
    fn slots_matching(&self, are: impl Fn(SimulatedProcess) -> bool) -> Vec<usize> {
        (0..self.slots.len()).filter(|index| are(self.slots[*index])).collect()
    }

    fn take_step(&mut self, step: AllocatorStep) {
        match step {
            AllocatorStep::Enqueue if !self.is_closed => drop(self.enqueue()),
            AllocatorStep::CancelWait(which) => {
                if let Some(ticket) = choose(self.waiters.iter().copied().collect(), which) {
                    self.cancel_wait(ticket);
                }
            }
            AllocatorStep::Release(which, is_fit) => {
                let condition = if is_fit { WorkerCondition::Reusable } else { WorkerCondition::Unusable };
                if let Some(ticket) = choose(self.holds.iter().copied().collect(), which) {
                    self.release_worker(ticket, condition);
                }
            }
            AllocatorStep::Ready(which) => {
                if let Some(slot) = choose(self.slots_matching(|process| process == SimulatedProcess::Starting), which)
                {
                    self.mark_ready(slot);
                }
            }
            AllocatorStep::Dying(which) => {
                if let Some(slot) =
                    choose(self.slots_matching(|process| matches!(process, SimulatedProcess::Alive(_))), which)
                {
                    self.mark_dying(slot);
                }
            }
            AllocatorStep::Gone(which, failed_alone) => {
                if let Some(slot) = choose(self.slots_matching(|process| process != SimulatedProcess::None), which) {
                    let is_wanted = !failed_alone && matches!(self.slots[slot], SimulatedProcess::Ending(_));
                    self.process_gone(slot, if is_wanted { None } else { failure("died") });
                }
            }
            AllocatorStep::AdvanceTime(millis) => self.advance_time(Duration::from_millis(millis)),
            AllocatorStep::Close if !self.is_closed => {
                self.is_closed = true;
                self.step(|allocator, _, effects| allocator.close(effects));
            }
            AllocatorStep::Enqueue | AllocatorStep::Close => {}
        }
        self.check_invariants();
    }
}

proptest! {
    #[test]
    fn waiters_keep_their_order_and_workers_have_one_holder(
        (min, max) in (0_usize..4).prop_flat_map(|min| (Just(min), min.max(1)..5)),
        steps in prop::collection::vec(step(), 1..200),
    ) {
        let mut simulation = AllocatorSimulation::new(rules(min, max));
        for step in steps {
            simulation.take_step(step);
        }
        // In the end each waiter gets a worker or a refusal, and after closing no process is left.
        simulation.advance_time(31 * SECOND);
        prop_assert!(simulation.waiters.is_empty(), "{:?} still wait", simulation.waiters);
        simulation.take_step(AllocatorStep::Close);
        for slot in simulation.slots_matching(|process| process != SimulatedProcess::None) {
            simulation.process_gone(slot, None);
        }
        prop_assert!(simulation.allocator.is_over());
        // The reason of the last failure is kept.
        prop_assert_eq!(ResourcePoolStatus { failure: None, ..simulation.allocator.status() }, ResourcePoolStatus::default());
    }
}

fn allocator_without_devices(workers: usize) -> WorkerAllocator {
    let long = Duration::from_secs(1_000);
    WorkerAllocator::new(PoolRules {
        min_workers: workers,
        max_workers: workers,
        acquire_patience: long,
        worker_timeout: long,
        idle_time: long,
        waits_for_devices: true,
    })
}

fn collect_effects(happens: impl FnOnce(&mut Vec<AllocatorEffect>)) -> Vec<AllocatorEffect> {
    let mut effects = Vec::new();
    happens(&mut effects);
    effects
}

#[test]
fn a_worker_starts_with_its_device_and_ends_with_it() {
    let (mut allocator, now, ticket) = (allocator_without_devices(2), Instant::now(), AcquireTicket(0));
    assert_eq!(collect_effects(|effects| allocator.advance_time(now, effects)), []);
    assert_eq!(collect_effects(|effects| allocator.enqueue(ticket, now, effects)), []);
    assert_eq!(collect_effects(|effects| allocator.attach_device(1, now, effects)), [AllocatorEffect::Start(1)]);
    assert_eq!(
        collect_effects(|effects| allocator.mark_ready(1, now, effects)),
        [AllocatorEffect::Grant { ticket, slot: 1 }]
    );
    let mut effects = Vec::new();
    assert_eq!(allocator.detach_device(1, now, &mut effects), Some(ticket), "the holder is returned");
    assert_eq!(effects, [AllocatorEffect::Kill(1)]);
    let gone = collect_effects(|effects| assert_eq!(allocator.process_gone(1, None, now, effects), None));
    assert_eq!(gone, [], "without a device it is not started again");
    assert_eq!(collect_effects(|effects| allocator.attach_device(1, now, effects)), [AllocatorEffect::Start(1)]);
}

#[test]
fn a_device_that_returns_while_the_old_worker_ends_is_used_afterwards() {
    let (mut allocator, now) = (allocator_without_devices(1), Instant::now());
    assert_eq!(collect_effects(|effects| allocator.attach_device(0, now, effects)), [AllocatorEffect::Start(0)]);
    assert_eq!(
        collect_effects(|effects| assert_eq!(allocator.detach_device(0, now, effects), None)),
        [AllocatorEffect::Kill(0)]
    );
    assert_eq!(collect_effects(|effects| allocator.attach_device(0, now, effects)), []);
    let gone = collect_effects(|effects| assert_eq!(allocator.process_gone(0, None, now, effects), None));
    assert_eq!(gone, [AllocatorEffect::Start(0)]);
}

#[test]
fn waiters_are_refused_when_every_device_is_denied() {
    let (mut allocator, now, ticket) = (allocator_without_devices(2), Instant::now(), AcquireTicket(0));
    assert_eq!(collect_effects(|effects| allocator.enqueue(ticket, now, effects)), []);
    assert_eq!(collect_effects(|effects| allocator.deny_device(0, "no such GPU".into(), effects)), []);
    assert_eq!(allocator.unavailable_reason(), None, "the other device may still come");
    let why = AcquireRefusal::NoWorker("no such GPU".into());
    assert_eq!(
        collect_effects(|effects| allocator.deny_device(1, "no such GPU".into(), effects)),
        [AllocatorEffect::Refuse { ticket, why }]
    );
    assert_eq!(allocator.unavailable_reason().as_deref(), Some("no such GPU"));
}
