//! Property: for any statistics and calls no GPU is promised twice, a whole GPU is exclusive, and each granted GPU was
//! listed and below the thresholds in the latest poll. Checked against a simple model.

use std::collections::BTreeMap;

use proptest::prelude::*;
use tokio::time::advance;

use super::*;

/// Memory of each GPU in `summary`, so that a thousandth is one MiB.
const GPU_MIB: i64 = 1000;

#[derive(Debug, Clone)]
enum AccountingStep {
    Poll { gpus: Vec<(u32, f64, u32)>, defect: SummaryDefect },
    Unreachable,
    Request { body: Box<RequestBody> },
    Confirm(prop::sample::Index),
    Release(prop::sample::Index),
    Follow(prop::sample::Index),
    Wait(Duration),
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum SummaryDefect {
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

fn request_body() -> impl Strategy<Value = Box<RequestBody>> {
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

fn step() -> impl Strategy<Value = AccountingStep> {
    let defect = prop_oneof![
        8 => Just(SummaryDefect::None),
        1 => Just(SummaryDefect::Stale),
        1 => Just(SummaryDefect::Failed),
        1 => (0_usize..9).prop_map(SummaryDefect::Count),
    ];
    let wait = prop_oneof![0_u64..3_000, 0_u64..30_000].prop_map(Duration::from_millis);
    prop_oneof![
        5 => (gpus(), defect).prop_map(|(gpus, defect)| AccountingStep::Poll { gpus, defect }),
        1 => Just(AccountingStep::Unreachable),
        6 => request_body().prop_map(|body| AccountingStep::Request { body }),
        2 => any::<prop::sample::Index>().prop_map(AccountingStep::Confirm),
        3 => any::<prop::sample::Index>().prop_map(AccountingStep::Release),
        2 => any::<prop::sample::Index>().prop_map(AccountingStep::Follow),
        3 => wait.prop_map(AccountingStep::Wait),
    ]
}

/// Load of a GPU beyond its promises, in thousandths of a percent.
#[derive(Debug, Clone, Copy)]
struct ObservedLoad {
    at: PoolTime,
    memory: i64,
    utilization: i64,
}

struct AccountingModel {
    accounting: ClientAccounting,
    requests: Vec<(u64, RequestBody)>,
    states: BTreeMap<u64, LeaseState>,
    /// Held parts: lease, GPU, thousandths, MiB.
    held: Vec<(u64, u32, i64, i64)>,
    /// Grantable GPUs as of the latest poll.
    foreign: BTreeMap<u32, ObservedLoad>,
    is_unreachable: bool,
}

impl AccountingModel {
    async fn run(&mut self, step: AccountingStep) -> Result<(), TestCaseError> {
        self.wait_until_settled().await?;
        match step {
            AccountingStep::Poll { gpus, defect } => self.poll(gpus, defect),
            AccountingStep::Unreachable => {
                self.accounting.suspend_grants();
                self.is_unreachable = true;
            }
            AccountingStep::Request { body } => {
                if let Ok(lease) = self.accounting.request(&body, &IdempotencyKey::random()) {
                    self.requests.push((lease.id, *body));
                }
            }
            AccountingStep::Wait(time) => advance(time).await,
            AccountingStep::Confirm(one) | AccountingStep::Release(one) | AccountingStep::Follow(one)
                if !self.requests.is_empty() =>
            {
                let id = self.requests[one.index(self.requests.len())].0;
                match step {
                    AccountingStep::Release(_) => drop(self.accounting.release(id)),
                    AccountingStep::Follow(_) => {
                        drop(self.accounting.follow_leases(&[id], Duration::from_secs(20)).await)
                    }
                    _ => {
                        let token = self.accounting.lease(id).and_then(|lease| lease.token).unwrap_or(0);
                        drop(self.accounting.confirm(id, token));
                    }
                }
            }
            AccountingStep::Confirm(_) | AccountingStep::Release(_) | AccountingStep::Follow(_) => {}
        }
        self.check()?;
        Ok(())
    }

    /// Advances to a time without pending changes: a reading at the instant of a change is a mixture.
    async fn wait_until_settled(&mut self) -> Result<(), TestCaseError> {
        loop {
            advance(Duration::from_millis(1)).await;
            if !self.check()? {
                return Ok(());
            }
        }
    }

    fn poll(&mut self, gpus: Vec<(u32, f64, u32)>, defect: SummaryDefect) {
        let mut reported = summary(&gpus);
        match defect {
            SummaryDefect::None => {}
            SummaryDefect::Stale => reported.stale = true,
            SummaryDefect::Failed => reported.error = Some("no driver".into()),
            // The memory stays the same or is estimated lower.
            SummaryDefect::Count(count) => reported.gpu_count = count.max(gpus.len()),
        }
        let numbers: std::collections::BTreeSet<u32> = gpus.iter().map(|gpu| gpu.0).collect();
        reported.total_memory_mb = reported.gpu_count.max(numbers.len()) as u64 * GPU_MIB as u64;
        self.record_load(&gpus, defect);
        self.accounting.apply_statistics(&reported, None);
    }

    fn record_load(&mut self, gpus: &[(u32, f64, u32)], defect: SummaryDefect) {
        if matches!(defect, SummaryDefect::Stale | SummaryDefect::Failed) {
            return;
        }
        self.is_unreachable = false;
        self.foreign.clear();
        for &(number, memory, utilization) in gpus {
            let is_once = gpus.iter().filter(|gpu| gpu.0 == number).count() == 1;
            if !is_once || !(0.0..=100.0).contains(&memory) || utilization > 100 || number > 5 {
                continue;
            }
            let here = self.held.iter().filter(|held| held.1 == number);
            let (share, mib) = here.fold((0, 0), |(share, mib), held| (share + held.2, mib + held.3));
            let foreign = ObservedLoad {
                at: self.accounting.lock().now(),
                memory: ((memory * 1000.0) as i64 - mib * 100_000 / GPU_MIB).max(0),
                utilization: (i64::from(utilization) * 1000 - share * 100).max(0),
            };
            self.foreign.insert(number, foreign);
        }
    }

    /// Whether anything changed; an error if a promise is broken.
    fn check(&mut self) -> Result<bool, TestCaseError> {
        let (before, mut is_change) = (std::mem::take(&mut self.held), false);
        for (id, body) in &self.requests {
            let lease = self.accounting.lease(*id).expect("few leases are all remembered");
            is_change |= self.states.insert(*id, lease.state) != Some(lease.state);
            let thousandths = |fraction: f64| (fraction * 1000.0).round() as i64;
            for device in &lease.devices {
                let mib = device.memory_mib.unwrap_or(0) as i64;
                self.held.push((*id, device.gpu_id, thousandths(device.fraction), mib));
                if !before.iter().any(|held| held.0 == *id) {
                    self.check_placement(*id, device.gpu_id, body)?;
                }
            }
        }
        self.check_promises()?;
        self.accounting.lock().pool.check_invariants().map_err(TestCaseError::fail)?;
        Ok(is_change)
    }

    fn check_placement(&self, lease: u64, number: u32, body: &RequestBody) -> Result<(), TestCaseError> {
        prop_assert!(!self.is_unreachable, "GPU {} was given while its server is away", number);
        let Some(foreign) = self.foreign.get(&number) else {
            return Err(TestCaseError::fail(format!("GPU {number} was given and is missing or unhealthy")));
        };
        let below =
            |foreign: i64, threshold: Option<f64>, usual: f64| foreign < (threshold.unwrap_or(usual) * 1000.0) as i64;
        prop_assert!(below(foreign.memory, body.memory_threshold, 80.0), "GPU {}: {:?} {:?}", number, foreign, body);
        prop_assert!(
            below(foreign.utilization, body.utilization_threshold, 90.0),
            "GPU {number}: {foreign:?} {body:?}"
        );
        let granted = self.accounting.lock().pool.lease(LeaseId(lease)).and_then(|lease| lease.granted_at);
        let age = granted.map(|granted| Duration::from_millis(granted.since(foreign.at).0));
        prop_assert!(age.is_some_and(|age| age <= MAX_AGE), "GPU {number} was given by a reading {age:?} old");
        Ok(())
    }

    fn check_promises(&self) -> Result<(), TestCaseError> {
        for number in 0..6 {
            let here: Vec<_> = self.held.iter().filter(|held| held.1 == number).collect();
            let (share, mib) = here.iter().fold((0, 0), |(share, mib), held| (share + held.2, mib + held.3));
            prop_assert!(share <= 1000 && mib <= GPU_MIB, "GPU {number} is over-promised: {here:?}");
            let is_whole = here.iter().any(|held| held.2 == 1000);
            prop_assert!(!is_whole || here.len() == 1, "GPU {number} is leased whole and shared: {here:?}");
        }
        Ok(())
    }
}

/// Returns the configuration; `PROPTEST_CASES` sets the number of cases.
fn config() -> ProptestConfig {
    let usual = ProptestConfig::default();
    ProptestConfig { cases: usual.cases.max(400), failure_persistence: None, ..usual }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn no_gpu_is_promised_twice_or_against_the_thresholds(
        steps in prop::collection::vec(step(), 1..80),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build()?;
        runtime.block_on(async {
            let mut model = AccountingModel {
                accounting: ClientAccounting::new("server1", "ann", MAX_AGE),
                requests: Vec::new(),
                states: BTreeMap::new(),
                held: Vec::new(),
                foreign: BTreeMap::new(),
                is_unreachable: true,
            };
            for step in steps {
                model.run(step).await?;
            }
            Ok::<(), TestCaseError>(())
        })?;
    }
}
