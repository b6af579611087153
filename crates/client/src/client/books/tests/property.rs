//! Whatever a server says and clients do: no GPU is promised twice, whole means alone, and nobody is given a GPU that was not
//! listed and below its thresholds when it was last looked at. Held against a model that is too simple to be wrong.

use std::collections::BTreeMap;

use proptest::prelude::*;
use tokio::time::advance;

use super::*;

/// What `summary` gives each GPU, so that a thousandth is a MiB.
const GPU_MIB: i64 = 1000;

#[derive(Debug, Clone)]
enum Step {
    Look { gpus: Vec<(u32, f64, u32)>, lie: Lie },
    Away,
    Ask { body: Box<RequestBody> },
    Confirm(prop::sample::Index),
    Release(prop::sample::Index),
    Follow(prop::sample::Index),
    Wait(Duration),
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Lie {
    None,
    Stale,
    Failed,
    Count(usize),
}

fn gpus() -> impl Strategy<Value = Vec<(u32, f64, u32)>> {
    let usually = (0_u32..5, (0_u32..=100).prop_map(f64::from), 0_u32..=100);
    let idle = (0_u32..5, Just(0.0), Just(0));
    let mad = prop_oneof![
        Just((1, f64::NAN, 0)),
        Just((1, 100.1, 0)),
        Just((2, 0.0, u32::MAX)),
        Just((u32::MAX, 0.0, 0)),
        Just((0, -1.0, 0)),
    ];
    prop::collection::vec(prop_oneof![6 => idle, 6 => usually, 1 => mad], 0..6)
}

fn body() -> impl Strategy<Value = Box<RequestBody>> {
    let amount = prop_oneof![
        3 => Just((None, None)),
        2 => (1_u32..=10).prop_map(|tenths| (Some(f64::from(tenths) / 10.0), None)),
        1 => (1_u64..1100).prop_map(|mib| (None, Some(mib))),
    ];
    let threshold = || prop_oneof![3 => Just(None), 1 => (0_u32..=100).prop_map(|percent| Some(f64::from(percent)))];
    let secs = || prop::option::weighted(0.3, (1_u32..60).prop_map(f64::from));
    let flags = (any::<bool>(), prop::bool::weighted(0.3), prop::option::weighted(0.2, 1_u16..4));
    (amount, threshold(), threshold(), secs(), secs(), flags).prop_map(
        |((fraction, memory_mib), memory_threshold, utilization_threshold, max, limit, (queue, hedged, gpus))| {
            Box::new(RequestBody {
                gpus,
                fraction,
                memory_mib,
                memory_threshold,
                utilization_threshold,
                max_duration_secs: max,
                wait_limit_secs: limit,
                queue: Some(queue),
                hedged,
                ..RequestBody::default()
            })
        },
    )
}

fn step() -> impl Strategy<Value = Step> {
    let lie = prop_oneof![
        8 => Just(Lie::None),
        1 => Just(Lie::Stale),
        1 => Just(Lie::Failed),
        1 => (0_usize..9).prop_map(Lie::Count),
    ];
    let wait = prop_oneof![0_u64..3_000, 0_u64..30_000].prop_map(Duration::from_millis);
    prop_oneof![
        5 => (gpus(), lie).prop_map(|(gpus, lie)| Step::Look { gpus, lie }),
        1 => Just(Step::Away),
        6 => body().prop_map(|body| Step::Ask { body }),
        2 => any::<prop::sample::Index>().prop_map(Step::Confirm),
        3 => any::<prop::sample::Index>().prop_map(Step::Release),
        2 => any::<prop::sample::Index>().prop_map(Step::Follow),
        3 => wait.prop_map(Step::Wait),
    ]
}

/// What was last seen of a GPU beyond what was promised then, in thousandths of a percent.
#[derive(Debug, Clone, Copy)]
struct Foreign {
    at: PoolTime,
    memory: i64,
    utilization: i64,
}

struct Model {
    books: Books,
    asked: Vec<(u64, RequestBody)>,
    states: BTreeMap<u64, LeaseState>,
    /// What is held: lease, GPU, thousandths, MiB.
    held: Vec<(u64, u32, i64, i64)>,
    /// GPUs that can be given, as far as the newest look tells.
    foreign: BTreeMap<u32, Foreign>,
    is_away: bool,
}

impl Model {
    async fn run(&mut self, step: Step) -> Result<(), TestCaseError> {
        self.quiet().await?;
        match step {
            Step::Look { gpus, lie } => self.look(gpus, lie),
            Step::Away => {
                self.books.away();
                self.is_away = true;
            }
            Step::Ask { body } => {
                if let Ok(lease) = self.books.request(&body, &IdempotencyKey::random()) {
                    self.asked.push((lease.id, *body));
                }
            }
            Step::Wait(time) => advance(time).await,
            Step::Confirm(one) | Step::Release(one) | Step::Follow(one) if !self.asked.is_empty() => {
                let id = self.asked[one.index(self.asked.len())].0;
                match step {
                    Step::Release(_) => drop(self.books.release(id)),
                    Step::Follow(_) => drop(self.books.follow_leases(&[id], Duration::from_secs(20)).await),
                    _ => {
                        let token = self.books.lease(id).and_then(|lease| lease.token).unwrap_or(0);
                        drop(self.books.confirm(id, token));
                    }
                }
            }
            Step::Confirm(_) | Step::Release(_) | Step::Follow(_) => {}
        }
        self.check()?;
        Ok(())
    }

    /// Goes on to a time at which nothing happens by itself: a reading of the very instant of a change is a mixture.
    async fn quiet(&mut self) -> Result<(), TestCaseError> {
        loop {
            advance(Duration::from_millis(1)).await;
            if !self.check()? {
                return Ok(());
            }
        }
    }

    fn look(&mut self, gpus: Vec<(u32, f64, u32)>, lie: Lie) {
        let mut told = summary(&gpus);
        match lie {
            Lie::None => {}
            Lie::Stale => told.stale = true,
            Lie::Failed => told.error = Some("no driver".into()),
            // The memory stays what it is, or is guessed to be less.
            Lie::Count(count) => told.gpu_count = count.max(gpus.len()),
        }
        let numbers: std::collections::BTreeSet<u32> = gpus.iter().map(|gpu| gpu.0).collect();
        told.total_memory_mb = told.gpu_count.max(numbers.len()) as u64 * GPU_MIB as u64;
        self.note(&gpus, lie);
        self.books.take_in(&told, None);
    }

    fn note(&mut self, gpus: &[(u32, f64, u32)], lie: Lie) {
        if matches!(lie, Lie::Stale | Lie::Failed) {
            return;
        }
        self.is_away = false;
        self.foreign.clear();
        for &(number, memory, utilization) in gpus {
            let is_once = gpus.iter().filter(|gpu| gpu.0 == number).count() == 1;
            if !is_once || !(0.0..=100.0).contains(&memory) || utilization > 100 || number > 5 {
                continue;
            }
            let here = self.held.iter().filter(|held| held.1 == number);
            let (share, mib) = here.fold((0, 0), |(share, mib), held| (share + held.2, mib + held.3));
            let foreign = Foreign {
                at: self.books.lock().now(),
                memory: ((memory * 1000.0) as i64 - mib * 100_000 / GPU_MIB).max(0),
                utilization: (i64::from(utilization) * 1000 - share * 100).max(0),
            };
            self.foreign.insert(number, foreign);
        }
    }

    /// Whether anything changed; an error where a promise is broken.
    fn check(&mut self) -> Result<bool, TestCaseError> {
        let (before, mut is_change) = (std::mem::take(&mut self.held), false);
        for (id, body) in &self.asked {
            let lease = self.books.lease(*id).expect("few leases are all remembered");
            is_change |= self.states.insert(*id, lease.state) != Some(lease.state);
            let thousandths = |fraction: f64| (fraction * 1000.0).round() as i64;
            for device in &lease.devices {
                let mib = device.memory_mib.unwrap_or(0) as i64;
                self.held.push((*id, device.gpu_id, thousandths(device.fraction), mib));
                if !before.iter().any(|held| held.0 == *id) {
                    self.may_be_given(*id, device.gpu_id, body)?;
                }
            }
        }
        self.nothing_is_promised_twice()?;
        self.books.lock().pool.check_invariants().map_err(TestCaseError::fail)?;
        Ok(is_change)
    }

    fn may_be_given(&self, lease: u64, number: u32, body: &RequestBody) -> Result<(), TestCaseError> {
        prop_assert!(!self.is_away, "GPU {} was given while its server is away", number);
        let Some(foreign) = self.foreign.get(&number) else {
            return Err(TestCaseError::fail(format!("GPU {number} was given and is not there or not right")));
        };
        let below =
            |foreign: i64, threshold: Option<f64>, usual: f64| foreign < (threshold.unwrap_or(usual) * 1000.0) as i64;
        prop_assert!(below(foreign.memory, body.memory_threshold, 80.0), "GPU {}: {:?} {:?}", number, foreign, body);
        prop_assert!(
            below(foreign.utilization, body.utilization_threshold, 90.0),
            "GPU {number}: {foreign:?} {body:?}"
        );
        let granted = self.books.lock().pool.lease(LeaseId(lease)).and_then(|lease| lease.granted_at);
        let age = granted.map(|granted| Duration::from_millis(granted.since(foreign.at).0));
        prop_assert!(age.is_some_and(|age| age <= MAX_AGE), "GPU {number} was given by a reading {age:?} old");
        Ok(())
    }

    fn nothing_is_promised_twice(&self) -> Result<(), TestCaseError> {
        for number in 0..6 {
            let here: Vec<_> = self.held.iter().filter(|held| held.1 == number).collect();
            let (share, mib) = here.iter().fold((0, 0), |(share, mib), held| (share + held.2, mib + held.3));
            prop_assert!(share <= 1000 && mib <= GPU_MIB, "GPU {number} is promised too often: {here:?}");
            let is_whole = here.iter().any(|held| held.2 == 1000);
            prop_assert!(!is_whole || here.len() == 1, "GPU {number} is somebody's alone: {here:?}");
        }
        Ok(())
    }
}

/// More with `PROPTEST_CASES`.
fn config() -> ProptestConfig {
    let usual = ProptestConfig::default();
    ProptestConfig { cases: usual.cases.max(400), failure_persistence: None, ..usual }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn whatever_happens_nothing_is_promised_twice_or_to_anybody_it_should_not_be(
        steps in prop::collection::vec(step(), 1..80),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build()?;
        runtime.block_on(async {
            let mut model = Model {
                books: Books::new("server1", "ann", MAX_AGE),
                asked: Vec::new(),
                states: BTreeMap::new(),
                held: Vec::new(),
                foreign: BTreeMap::new(),
                is_away: true,
            };
            for step in steps {
                model.run(step).await?;
            }
            Ok::<(), TestCaseError>(())
        })?;
    }
}
