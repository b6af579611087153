use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn rules(min_workers: usize, max_workers: usize) -> Rules {
    Rules {
        min_workers,
        max_workers,
        acquire_patience: 30 * SECOND,
        worker_timeout: 10 * SECOND,
        idle_time: 60 * SECOND,
        devices_come_later: false,
    }
}

/// The outside world: does what it is told, and refuses what cannot be.
struct World {
    roster: Roster,
    rules: Rules,
    now: Instant,
    slots: Vec<Process>,
    /// Slots whose process is about to be gone.
    dying: BTreeSet<usize>,
    /// Who waits, in the order they came.
    line: VecDeque<u64>,
    holds: BTreeSet<u64>,
    refused: Vec<(u64, Refusal)>,
    next: u64,
    is_closed: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Process {
    None,
    Starting,
    Alive(Option<u64>),
    /// Told to end, perhaps while somebody has it.
    Ending(Option<u64>),
}

impl World {
    fn new(rules: Rules) -> Self {
        let slots = vec![Process::None; rules.max_workers];
        let (line, holds, refused, dying) = (VecDeque::new(), BTreeSet::new(), Vec::new(), BTreeSet::new());
        let (roster, now) = (Roster::new(rules), Instant::now());
        let mut world = Self { roster, rules, now, slots, dying, line, holds, refused, next: 0, is_closed: false };
        world.step(|roster, now, effects| roster.tick(now, effects));
        world
    }

    fn step<T>(&mut self, happens: impl FnOnce(&mut Roster, Instant, &mut Vec<Effect>) -> T) -> T {
        let mut effects = Vec::new();
        let told = happens(&mut self.roster, self.now, &mut effects);
        effects.into_iter().for_each(|effect| self.obey(effect));
        told
    }

    fn obey(&mut self, effect: Effect) {
        match effect {
            Effect::Start(at) => {
                assert_eq!(self.slots[at], Process::None, "slot {at} has a process already");
                self.slots[at] = Process::Starting;
            }
            Effect::Grant { ticket, slot } => {
                assert_eq!(self.line.pop_front(), Some(ticket.0), "not whoever came first");
                assert_eq!(self.slots[slot], Process::Alive(None), "slot {slot} is not free");
                assert!(!self.dying.contains(&slot), "slot {slot} is about to be gone");
                self.slots[slot] = Process::Alive(Some(ticket.0));
                assert!(self.holds.insert(ticket.0));
            }
            Effect::Refuse { ticket, why } => {
                let at = self.line.iter().position(|waiter| *waiter == ticket.0);
                self.line.remove(at.unwrap_or_else(|| panic!("{ticket:?} does not wait")));
                self.refused.push((ticket.0, why));
            }
            Effect::TimeUp { ticket, slot } => {
                let (Process::Alive(holder) | Process::Ending(holder)) = self.slots[slot] else { panic!("no process") };
                assert_eq!(holder, Some(ticket.0));
                assert!(self.holds.remove(&ticket.0));
                self.slots[slot] = Process::Ending(None);
            }
            Effect::Stop(slot) => {
                let Process::Alive(holder) = self.slots[slot] else { panic!("{:?} is stopped", self.slots[slot]) };
                assert!(holder.is_none() || self.is_closed, "it has a holder");
                self.slots[slot] = Process::Ending(holder);
            }
            Effect::Kill(slot) => {
                assert_ne!(self.slots[slot], Process::None, "there is nothing to kill");
                self.slots[slot] = Process::Ending(None);
            }
        }
    }

    fn ask(&mut self) -> u64 {
        let ticket = self.next;
        self.next += 1;
        self.line.push_back(ticket);
        self.step(|roster, now, effects| roster.ask(Ticket(ticket), now, effects));
        ticket
    }

    fn leave(&mut self, ticket: u64) {
        self.line.retain(|waiter| *waiter != ticket);
        self.roster.leave(Ticket(ticket));
    }

    fn give_back(&mut self, ticket: u64, fitness: Fitness) {
        let was_held = self.holds.remove(&ticket);
        for process in &mut self.slots {
            match process {
                Process::Alive(holder) if *holder == Some(ticket) => *process = Process::Alive(None),
                Process::Ending(holder) if *holder == Some(ticket) => *process = Process::Ending(None),
                _ => {}
            }
        }
        let ended = self.step(|roster, now, effects| roster.give_back(Ticket(ticket), fitness, now, effects));
        assert_eq!(ended, was_held);
    }

    fn ready(&mut self, slot: usize) {
        self.slots[slot] = Process::Alive(None);
        self.step(|roster, now, effects| roster.ready(slot, now, effects));
    }

    fn dying(&mut self, slot: usize) {
        self.dying.insert(slot);
        self.roster.dying(slot);
    }

    fn gone(&mut self, slot: usize, failure: Option<Arc<str>>) {
        self.dying.remove(&slot);
        let holder = match std::mem::replace(&mut self.slots[slot], Process::None) {
            Process::Alive(holder) | Process::Ending(holder) => holder,
            _ => None,
        };
        if let Some(holder) = holder {
            self.holds.remove(&holder);
        }
        let told = self.step(|roster, now, effects| roster.gone(slot, failure, now, effects));
        assert_eq!(told, holder.map(Ticket));
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        self.step(|roster, now, effects| roster.tick(now, effects));
    }

    fn all_ready(&mut self) {
        for slot in 0..self.slots.len() {
            if self.slots[slot] == Process::Starting {
                self.ready(slot);
            }
        }
    }

    fn free(&self) -> usize {
        let is_free = |at: &usize| self.slots[*at] == Process::Alive(None) && !self.dying.contains(at);
        (0..self.slots.len()).filter(is_free).count()
    }

    /// What must be true at any moment.
    fn check(&self) {
        let counts = self.roster.status();
        assert_eq!((counts.waiting_tasks, counts.active_tasks), (self.line.len(), self.holds.len()));
        assert!(counts.total_workers <= self.rules.max_workers);
        if self.is_closed {
            return assert!(self.line.is_empty());
        }
        assert_eq!(counts.available_workers, self.free());
        assert!(counts.total_workers >= self.rules.min_workers, "{counts:?}");
        assert!(self.line.is_empty() || counts.available_workers == 0, "somebody waits while a worker is free");
        let is_somebody_coming = self.slots.iter().any(|process| *process != Process::None);
        let is_told_later = self.roster.next_deadline().is_some();
        assert!(self.line.is_empty() || is_somebody_coming || is_told_later, "nobody comes for who waits");
    }
}

fn own(why: &str) -> Option<Arc<str>> {
    Some(why.into())
}

#[test]
fn workers_come_with_load_and_go_when_idle() {
    let mut world = World::new(rules(1, 3));
    world.all_ready();
    let tickets: Vec<u64> = (0..5).map(|_| world.ask()).collect();
    assert_eq!(world.slots, [Process::Alive(Some(0)), Process::Starting, Process::Starting]);
    world.all_ready();
    for ticket in tickets {
        world.give_back(ticket, Fitness::Fit);
    }
    assert_eq!(
        world.roster.status(),
        ResourcePoolStatus { total_workers: 3, available_workers: 3, ..ResourcePoolStatus::default() }
    );
    world.pass(59 * SECOND);
    assert_eq!(world.free(), 3);
    world.pass(SECOND);
    assert_eq!(world.slots, [Process::Alive(None), Process::Ending(None), Process::Ending(None)]);
    world.gone(1, None);
    world.gone(2, None);
    assert_eq!(world.roster.status().total_workers, 1);
    assert_eq!(world.roster.next_deadline(), None);
}

#[test]
fn whoever_waits_too_long_is_told_and_whoever_left_is_passed_over() {
    let mut world = World::new(rules(1, 1));
    world.all_ready();
    let tickets: Vec<u64> = (0..4).map(|_| world.ask()).collect();
    world.leave(tickets[1]);
    world.pass(9 * SECOND);
    world.give_back(tickets[0], Fitness::Fit);
    assert_eq!(world.holds, BTreeSet::from([tickets[2]]));
    world.pass(10 * SECOND);
    assert!(world.holds.is_empty(), "its time was up");
    world.pass(11 * SECOND);
    assert_eq!(world.refused, [(tickets[3], Refusal::Patience)]);
}

#[test]
fn an_unfit_worker_is_replaced_before_anybody_gets_it() {
    let mut world = World::new(rules(1, 1));
    world.all_ready();
    let (first, second) = (world.ask(), world.ask());
    world.give_back(first, Fitness::Unfit);
    assert_eq!(world.slots, [Process::Ending(None)]);
    world.gone(0, None);
    assert_eq!(world.slots, [Process::Starting]);
    world.ready(0);
    assert_eq!(world.holds, BTreeSet::from([second]));
}

#[test]
fn where_none_can_be_started_it_is_said_and_tried_again_ever_more_slowly() {
    let mut world = World::new(rules(1, 4));
    let ticket = world.ask();
    let mut starts = 0;
    while world.refused.is_empty() {
        let slot = world.slots.iter().position(|process| *process == Process::Starting);
        match slot {
            Some(slot) => (starts, _) = (starts + 1, world.gone(slot, own("no model"))),
            None => world.pass(Duration::from_millis(50)),
        }
        world.check();
        assert!(starts < 50);
    }
    assert_eq!(world.refused, [(ticket, Refusal::NoWorker("no model".into()))]);
    assert!(world.roster.hopeless().is_some());
    world.pass(2 * SECOND);
    world.ask();
    let slot = world.slots.iter().position(|process| *process == Process::Starting).unwrap();
    world.ready(slot);
    assert_eq!((world.holds.len(), world.roster.hopeless()), (1, None));
}

#[test]
fn a_place_that_never_works_leaves_the_work_to_the_others() {
    let mut world = World::new(rules(1, 2));
    world.ask();
    world.gone(0, own("broken"));
    assert_eq!(world.slots[1], Process::Starting);
    world.ready(1);
    assert_eq!(world.holds.len(), 1);
}

#[derive(Debug, Clone)]
enum Step {
    Ask,
    Leave(usize),
    GiveBack(usize, bool),
    Ready(usize),
    Dying(usize),
    Gone(usize, bool),
    Pass(u64),
    Close,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => Just(Step::Ask),
        2 => any::<usize>().prop_map(Step::Leave),
        4 => (any::<usize>(), any::<bool>()).prop_map(|(which, is_fit)| Step::GiveBack(which, is_fit)),
        6 => any::<usize>().prop_map(Step::Ready),
        2 => any::<usize>().prop_map(Step::Dying),
        4 => (any::<usize>(), any::<bool>()).prop_map(|(which, is_own)| Step::Gone(which, is_own)),
        3 => (0_u64..40_000).prop_map(Step::Pass),
        1 => Just(Step::Close),
    ]
}

/// The `which`-th of those that can be chosen.
fn choose<T: Clone>(from: Vec<T>, which: usize) -> Option<T> {
    (!from.is_empty()).then(|| from[which % from.len()].clone())
}

impl World {
    fn slots_that(&self, are: impl Fn(Process) -> bool) -> Vec<usize> {
        (0..self.slots.len()).filter(|at| are(self.slots[*at])).collect()
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Ask if !self.is_closed => drop(self.ask()),
            Step::Leave(which) => {
                if let Some(ticket) = choose(self.line.iter().copied().collect(), which) {
                    self.leave(ticket);
                }
            }
            Step::GiveBack(which, is_fit) => {
                let fitness = if is_fit { Fitness::Fit } else { Fitness::Unfit };
                if let Some(ticket) = choose(self.holds.iter().copied().collect(), which) {
                    self.give_back(ticket, fitness);
                }
            }
            Step::Ready(which) => {
                if let Some(slot) = choose(self.slots_that(|process| process == Process::Starting), which) {
                    self.ready(slot);
                }
            }
            Step::Dying(which) => {
                if let Some(slot) = choose(self.slots_that(|process| matches!(process, Process::Alive(_))), which) {
                    self.dying(slot);
                }
            }
            Step::Gone(which, is_own) => {
                if let Some(slot) = choose(self.slots_that(|process| process != Process::None), which) {
                    let is_wanted = !is_own && matches!(self.slots[slot], Process::Ending(_));
                    self.gone(slot, if is_wanted { None } else { own("died") });
                }
            }
            Step::Pass(millis) => self.pass(Duration::from_millis(millis)),
            Step::Close if !self.is_closed => {
                self.is_closed = true;
                self.step(|roster, _, effects| roster.close(effects));
            }
            Step::Ask | Step::Close => {}
        }
        self.check();
    }
}

proptest! {
    #[test]
    fn nobody_is_passed_nobody_shares_and_nobody_is_forgotten(
        (min, max) in (0_usize..4).prop_flat_map(|min| (Just(min), min.max(1)..5)),
        steps in prop::collection::vec(step(), 1..200),
    ) {
        let mut world = World::new(rules(min, max));
        for step in steps {
            world.take(step);
        }
        // In the end everybody gets a worker or is told why not, and closed, nothing is left.
        world.pass(31 * SECOND);
        prop_assert!(world.line.is_empty(), "{:?} still wait", world.line);
        world.take(Step::Close);
        for slot in world.slots_that(|process| process != Process::None) {
            world.gone(slot, None);
        }
        prop_assert!(world.roster.is_over());
        // Why the last worker died stays known.
        prop_assert_eq!(ResourcePoolStatus { failure: None, ..world.roster.status() }, ResourcePoolStatus::default());
    }
}

fn roster(workers: usize) -> Roster {
    let long = Duration::from_secs(1_000);
    Roster::new(Rules {
        min_workers: workers,
        max_workers: workers,
        acquire_patience: long,
        worker_timeout: long,
        idle_time: long,
        devices_come_later: true,
    })
}

fn told(happens: impl FnOnce(&mut Vec<Effect>)) -> Vec<Effect> {
    let mut effects = Vec::new();
    happens(&mut effects);
    effects
}

#[test]
fn a_worker_is_started_when_it_has_a_device_and_goes_with_it() {
    let (mut roster, now, ticket) = (roster(2), Instant::now(), Ticket(0));
    assert_eq!(told(|effects| roster.tick(now, effects)), []);
    assert_eq!(told(|effects| roster.ask(ticket, now, effects)), []);
    assert_eq!(told(|effects| roster.equip(1, now, effects)), [Effect::Start(1)]);
    assert_eq!(told(|effects| roster.ready(1, now, effects)), [Effect::Grant { ticket, slot: 1 }]);
    let mut effects = Vec::new();
    assert_eq!(roster.strip(1, now, &mut effects), Some(ticket), "whoever has it is told");
    assert_eq!(effects, [Effect::Kill(1)]);
    let gone = told(|effects| assert_eq!(roster.gone(1, None, now, effects), None));
    assert_eq!(gone, [], "without a device it is not started again");
    assert_eq!(told(|effects| roster.equip(1, now, effects)), [Effect::Start(1)]);
}

#[test]
fn a_device_that_comes_back_while_the_old_worker_ends_is_used_after_it() {
    let (mut roster, now) = (roster(1), Instant::now());
    assert_eq!(told(|effects| roster.equip(0, now, effects)), [Effect::Start(0)]);
    assert_eq!(told(|effects| assert_eq!(roster.strip(0, now, effects), None)), [Effect::Kill(0)]);
    assert_eq!(told(|effects| roster.equip(0, now, effects)), []);
    let gone = told(|effects| assert_eq!(roster.gone(0, None, now, effects), None));
    assert_eq!(gone, [Effect::Start(0)]);
}

#[test]
fn who_waits_is_told_when_no_device_will_ever_come() {
    let (mut roster, now, ticket) = (roster(2), Instant::now(), Ticket(0));
    assert_eq!(told(|effects| roster.ask(ticket, now, effects)), []);
    assert_eq!(told(|effects| roster.deny(0, "no such GPU".into(), effects)), []);
    assert_eq!(roster.hopeless(), None, "the other may come");
    let why = Refusal::NoWorker("no such GPU".into());
    assert_eq!(told(|effects| roster.deny(1, "no such GPU".into(), effects)), [Effect::Refuse { ticket, why }]);
    assert_eq!(roster.hopeless().as_deref(), Some("no such GPU"));
}
