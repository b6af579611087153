//! Which endpoint is asked first. Knows no clock, no network and no chance of its own.

use std::cmp::Ordering;
use std::str::FromStr;
use std::time::Duration;

use crate::ClientError;

/// How one of several endpoints is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Balancing {
    /// The highest share of available GPUs, then most of them, then the fastest.
    #[default]
    Availability,
    /// Each in turn.
    RoundRobin,
    /// In proportion to how many GPUs each has.
    Weighted,
}

impl Balancing {
    /// The name it goes by.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Availability => "availability",
            Self::RoundRobin => "round_robin",
            Self::Weighted => "weighted",
        }
    }
}

impl FromStr for Balancing {
    type Err = ClientError;

    fn from_str(text: &str) -> Result<Self, ClientError> {
        let named = [Self::Availability, Self::RoundRobin, Self::Weighted].into_iter().find(|one| one.name() == text);
        named.ok_or_else(|| ClientError::Setting {
            what: "load_balancing_strategy",
            value: format!("{text:?}"),
            allowed: "availability, round_robin or weighted".into(),
        })
    }
}

/// An endpoint that could serve a request.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Candidate {
    /// Its number.
    pub place: usize,
    /// How many GPUs it has.
    pub total: usize,
    /// How many of them would do.
    pub available: usize,
    /// How fast it answers.
    pub response: Duration,
    /// How much of its share of the work it gets, 0..=1: less for one that has just come back.
    pub share: f64,
    /// Whether it has not answered lately: asked only where nobody else can be.
    pub is_suspect: bool,
}

/// Chooses, and remembers what it chose.
#[derive(Debug)]
pub(super) struct Balancer {
    strategy: Balancing,
    /// When each endpoint was last chosen, counted in choices; or what each is still owed.
    turns: Vec<f64>,
    choices: f64,
}

impl Balancer {
    /// `chance` in 0..1 decides who comes first, so that many clients do not begin at the same endpoint.
    pub fn new(strategy: Balancing, places: usize, mut chance: impl FnMut() -> f64) -> Self {
        // Between -1 and 0: no endpoint is ahead of one that was chosen.
        let turns = (0..places).map(|_| -chance()).collect();
        Self { strategy, turns, choices: 0.0 }
    }

    pub fn strategy(&self) -> Balancing {
        self.strategy
    }

    /// The candidates, best first. The first counts as chosen until [`Balancer::moved`] says otherwise.
    pub fn order(&mut self, mut candidates: Vec<Candidate>, mut chance: impl FnMut() -> f64) -> Vec<usize> {
        let weights: f64 = candidates.iter().map(|one| one.total as f64).sum();
        if self.strategy == Balancing::Weighted {
            for one in &candidates {
                self.turns[one.place] += one.total as f64 / weights.max(1.0);
            }
        }
        candidates.sort_by(|a, b| {
            a.is_suspect.cmp(&b.is_suspect).then_with(|| self.compare(a, b)).then(a.place.cmp(&b.place))
        });
        if let Some(first) = candidates.first() {
            self.charge(first.place);
        }
        // One that has just come back lets some of its turns pass; they are not made up for.
        for _ in 1..candidates.len() {
            let is_passed = candidates.first().is_some_and(|first| first.share < 1.0 && chance() >= first.share);
            if !is_passed {
                break;
            }
            candidates.rotate_left(1);
        }
        candidates.iter().map(|one| one.place).collect()
    }

    /// The one that was chosen did not serve; another one does.
    pub fn moved(&mut self, from: usize, to: usize) {
        if self.strategy == Balancing::Weighted {
            self.turns[from] += 1.0;
        }
        self.charge(to);
    }

    fn charge(&mut self, place: usize) {
        self.choices += 1.0;
        match self.strategy {
            Balancing::Availability => {}
            Balancing::RoundRobin => self.turns[place] = self.choices,
            Balancing::Weighted => self.turns[place] -= 1.0,
        }
    }

    fn compare(&self, a: &Candidate, b: &Candidate) -> Ordering {
        match self.strategy {
            Balancing::Availability => {
                // Shares compared without dividing: a/A against b/B.
                let share = (b.available * a.total.max(1)).cmp(&(a.available * b.total.max(1)));
                share.then(b.available.cmp(&a.available)).then(a.response.cmp(&b.response))
            }
            Balancing::RoundRobin => self.turns[a.place].total_cmp(&self.turns[b.place]),
            Balancing::Weighted => self.turns[b.place].total_cmp(&self.turns[a.place]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(place: usize, total: usize, available: usize) -> Candidate {
        let response = Duration::from_millis(1);
        Candidate { place, total, available, response, share: 1.0, is_suspect: false }
    }

    fn split(strategy: Balancing, candidates: &[Candidate], times: usize) -> Vec<usize> {
        let mut balancer = Balancer::new(strategy, candidates.len(), || 0.5);
        let mut counts = vec![0; candidates.len()];
        for _ in 0..times {
            counts[balancer.order(candidates.to_vec(), || 0.5)[0]] += 1;
        }
        counts
    }

    #[test]
    fn availability_takes_the_highest_share_then_most_then_fastest() {
        let mut balancer = Balancer::new(Balancing::Availability, 4, || 0.0);
        let mut fast = candidate(3, 4, 2);
        fast.response = Duration::from_micros(10);
        let order = balancer.order(vec![candidate(0, 8, 2), candidate(1, 8, 4), candidate(2, 4, 2), fast], || 0.0);
        assert_eq!(order, [1, 3, 2, 0]);
    }

    #[test]
    fn round_robin_is_even_and_weighted_follows_the_number_of_gpus() {
        let three = [candidate(0, 8, 8), candidate(1, 4, 4), candidate(2, 4, 4)];
        assert_eq!(split(Balancing::RoundRobin, &three, 999), [333, 333, 333]);
        assert_eq!(split(Balancing::Weighted, &three, 1_000), [500, 250, 250]);
    }

    #[test]
    fn an_endpoint_without_capacity_for_a_while_is_not_flooded_afterwards() {
        let mut balancer = Balancer::new(Balancing::RoundRobin, 2, || 0.5);
        for _ in 0..100 {
            balancer.order(vec![candidate(0, 1, 1)], || 0.5);
        }
        let both: Vec<usize> =
            (0..4).map(|_| balancer.order(vec![candidate(0, 1, 1), candidate(1, 1, 1)], || 0.5)[0]).collect();
        assert_eq!(both, [1, 0, 1, 0]);
    }

    #[test]
    fn one_that_came_back_gets_its_part_and_a_suspect_comes_last() {
        let mut balancer = Balancer::new(Balancing::RoundRobin, 2, || 0.5);
        let mut back = candidate(0, 4, 4);
        back.share = 0.25;
        let mut chance = (0..).map(|n| f64::from(n * 37 % 100) / 100.0);
        let mut first = 0;
        for _ in 0..1_000 {
            let order = balancer.order(vec![back.clone(), candidate(1, 4, 4)], || chance.next().unwrap());
            first += usize::from(order[0] == 0);
        }
        // A quarter of its half.
        assert!((100..=150).contains(&first), "{first}");
        let mut suspect = candidate(0, 4, 4);
        suspect.is_suspect = true;
        assert_eq!(balancer.order(vec![suspect, candidate(1, 4, 1)], || 0.0), [1, 0]);
    }

    #[test]
    fn what_another_one_served_is_counted_there() {
        let mut balancer = Balancer::new(Balancing::Weighted, 2, || 0.5);
        let mut served = [0, 0];
        for _ in 0..100 {
            let order = balancer.order(vec![candidate(0, 1, 1), candidate(1, 1, 1)], || 0.5);
            // The first endpoint refuses every second time.
            let at = if order[0] == 0 && served[0] % 2 == 1 { order[1] } else { order[0] };
            if at != order[0] {
                balancer.moved(order[0], at);
            }
            served[at] += 1;
        }
        assert_eq!(served[0] + served[1], 100);
        assert!(served[1] > 0);
    }

    #[test]
    fn a_strategy_nobody_knows_is_named() {
        let error = "fastest".parse::<Balancing>().unwrap_err().to_string();
        assert!(error.contains("fastest") && error.contains("round_robin"), "{error}");
    }
}
