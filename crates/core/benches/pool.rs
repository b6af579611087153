//! Cost of decisions: grant + release by size of the pool, the next grant from a long queue, and bytes.
//!
//! `cargo bench -p gpupool-core`. divan measures the times; the sizes are counted by the allocator and printed first.

#![allow(unsafe_code, reason = "counting bytes takes a global allocator")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use divan::{Bencher, black_box};
use gpupool_core::{
    ApplyOutcome, Bytes, CommandDenied, CommandReply, DeviceFacts, DeviceId, DeviceIdentity, DeviceMemory,
    DeviceReading, IsolationSupport, LeaseId, MilliCpus, Millis, NodeFacts, PlacementStrategy, Policies, Pool,
    PoolCommand, PoolSettings, PoolTime, Request, RequestedAmount, Share, Vendor,
};

/// Allocator that counts live bytes and calls.
struct CountingAllocator;

static LIVE: AtomicI64 = AtomicI64::new(0);
static CALLS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size() as i64, Ordering::Relaxed);
        CALLS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as required of our caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size() as i64, Ordering::Relaxed);
        // SAFETY: as required of our caller.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const SIZES: [usize; 4] = [8, 1_000, 10_000, 100_000];
const GPUS_PER_NODE: usize = 8;

fn main() {
    print_sizes();
    divan::Divan::from_args().sample_count(2_000).main();
}

fn device(node: usize, number: usize) -> DeviceFacts {
    let gib = 1 << 30;
    DeviceFacts {
        identity: DeviceIdentity::Uuid(format!("GPU-{node:08x}-0000-0000-0000-{number:012x}").into()),
        vendor: Vendor::Nvidia,
        model: "NVIDIA H100 80GB HBM3".into(),
        memory: Some(DeviceMemory { total: Bytes(80 * gib), reserved: Bytes(gib / 2) }),
        partition: None,
        isolation: IsolationSupport::BASIC,
        labels: Default::default(),
    }
}

/// Creates a pool of devices that were all read once and are idle.
fn idle_pool(devices: usize) -> Pool {
    let mut pool = Pool::new(PoolSettings::default(), Policies::default());
    for node in 0..devices.div_ceil(GPUS_PER_NODE) {
        let facts = NodeFacts {
            name: format!("node-{node}").into(),
            cpus: MilliCpus(128_000),
            memory: Bytes(1 << 40),
            labels: Default::default(),
        };
        let here = GPUS_PER_NODE.min(devices - node * GPUS_PER_NODE);
        pool.apply(
            PoolTime(0),
            PoolCommand::NodeSeen {
                facts,
                devices: (0..here).map(|number| device(node, number)).collect(),
                numbers: Vec::new(),
            },
        )
        .0
        .expect("a node can always be seen");
    }
    for number in 0..devices as u32 {
        let command = PoolCommand::Observe { device: DeviceId(number), reading: DeviceReading::idle(PoolTime(0)) };
        pool.apply(PoolTime(0), command).0.expect("the device is known");
    }
    pool
}

fn request(amount: RequestedAmount, strategy: PlacementStrategy) -> Arc<Request> {
    Arc::new(Request {
        amount,
        strategy: Some(strategy),
        thresholds: Some(Default::default()),
        owner: "alice".into(),
        ttl: Millis::from_secs(86_400),
        ..Request::default()
    })
}

/// Applies a batch of one command, with a reused outcome.
fn apply(pool: &mut Pool, command: PoolCommand, out: &mut ApplyOutcome) -> Result<CommandReply, CommandDenied> {
    out.clear();
    pool.begin_batch(PoolTime(1), out);
    let answer = pool.apply_in_batch(command, out);
    pool.finish_batch(out);
    answer
}

fn ask(pool: &mut Pool, request: &Arc<Request>, out: &mut ApplyOutcome) -> Result<LeaseId, CommandDenied> {
    match apply(pool, PoolCommand::Request { request: request.clone(), key: None, by_admin: false }, out)? {
        CommandReply::Lease(lease) => Ok(lease),
        other => unreachable!("a request is answered with a lease, not {other:?}"),
    }
}

fn release(pool: &mut Pool, lease: LeaseId, out: &mut ApplyOutcome) {
    apply(pool, PoolCommand::Release { lease }, out).expect("the lease is known");
}

/// Promises half of the capacity: devices are split into halves, thirds or quarters, or left free.
fn half_full(devices: usize, strategy: PlacementStrategy) -> Pool {
    let mut pool = idle_pool(devices);
    let mut out = ApplyOutcome::default();
    let shares = [Some(500), Some(750), Some(250), None, Some(1000), Some(334), Some(666), Some(500)];
    for number in 0..devices {
        let Some(share) = shares[number % shares.len()] else { continue };
        let select = gpupool_core::DeviceSelector {
            uuids: vec![
                format!("GPU-{:08x}-0000-0000-0000-{:012x}", number / GPUS_PER_NODE, number % GPUS_PER_NODE).into(),
            ],
            ..Default::default()
        };
        let amount = if share == 1000 { RequestedAmount::Whole } else { RequestedAmount::Share(Share(share)) };
        let request = Request { select: Arc::new(select), ..(*request(amount, strategy)).clone() };
        // A request for a named device checks all of them; fill the large pools by placement instead.
        if devices <= 1_000 {
            ask(&mut pool, &Arc::new(request), &mut out).expect("the device is free");
        } else {
            let spread =
                Request { select: Default::default(), strategy: Some(PlacementStrategy::RoundRobin), ..request };
            ask(&mut pool, &Arc::new(spread), &mut out).expect("there is room");
        }
    }
    pool
}

mod grant_and_release {
    use super::*;

    fn bench(bencher: Bencher<'_, '_>, devices: usize, strategy: PlacementStrategy, amount: RequestedAmount) {
        let mut pool = half_full(devices, strategy);
        let request = request(amount, strategy);
        let mut out = ApplyOutcome::default();
        let first = ask(&mut pool, &request, &mut out).expect("half of the pool is free");
        release(&mut pool, first, &mut out);
        bencher.bench_local(|| {
            let lease = ask(&mut pool, &request, &mut out).expect("half of the pool is free");
            release(&mut pool, black_box(lease), &mut out);
        });
    }

    const QUARTER: RequestedAmount = RequestedAmount::Share(Share(250));

    #[divan::bench(args = SIZES)]
    fn first_fit(bencher: Bencher<'_, '_>, devices: usize) {
        bench(bencher, devices, PlacementStrategy::FirstFit, QUARTER);
    }

    #[divan::bench(args = SIZES)]
    fn best_fit(bencher: Bencher<'_, '_>, devices: usize) {
        bench(bencher, devices, PlacementStrategy::BestFit, QUARTER);
    }

    #[divan::bench(args = SIZES)]
    fn worst_fit(bencher: Bencher<'_, '_>, devices: usize) {
        bench(bencher, devices, PlacementStrategy::WorstFit, QUARTER);
    }

    #[divan::bench(args = SIZES)]
    fn round_robin(bencher: Bencher<'_, '_>, devices: usize) {
        bench(bencher, devices, PlacementStrategy::RoundRobin, QUARTER);
    }

    #[divan::bench(args = SIZES)]
    fn load_balanced(bencher: Bencher<'_, '_>, devices: usize) {
        bench(bencher, devices, PlacementStrategy::LoadBalanced, QUARTER);
    }

    #[divan::bench(args = SIZES)]
    fn least_used_whole(bencher: Bencher<'_, '_>, devices: usize) {
        bench(bencher, devices, PlacementStrategy::LeastUsed, RequestedAmount::Whole);
    }
}

/// Baseline: best-fit by a scan of all devices, without rows, tokens, deadlines or accounts.
mod bare_scan {
    use super::*;

    #[divan::bench(args = SIZES)]
    fn best_fit(bencher: Bencher<'_, '_>, devices: usize) {
        let shares = [500_u32, 250, 750, 1000, 0, 666, 334, 500];
        let mut free: Vec<u32> = (0..devices).map(|number| shares[number % shares.len()]).collect();
        bencher.bench_local(|| {
            let fitting = free.iter().enumerate().filter(|(_, free)| **free >= 250);
            let (best, _) = fitting.min_by_key(|(_, free)| **free).expect("there is room");
            free[best] -= 250;
            free[black_box(best)] += 250;
        });
    }
}

mod queue {
    use super::*;

    /// All devices are held and requests wait: a release grants the next one, and its owner queues again at the end.
    fn bench(bencher: Bencher<'_, '_>, devices: usize, waiting: usize, owners: usize) {
        let mut pool = idle_pool(devices);
        let mut out = ApplyOutcome::default();
        let requests: Vec<Arc<Request>> = (0..owners)
            .map(|owner| {
                let whole = (*request(RequestedAmount::Whole, PlacementStrategy::LeastUsed)).clone();
                Arc::new(Request { owner: format!("owner-{owner}").into(), ..whole })
            })
            .collect();
        let mut next_owner = requests.iter().cycle();
        let mut ask_next = |pool: &mut Pool, out: &mut ApplyOutcome| {
            let request = next_owner.next().expect("a cycle never ends");
            ask(pool, request, out).expect("it may wait")
        };
        let mut holders: std::collections::VecDeque<LeaseId> = std::collections::VecDeque::new();
        for _ in 0..devices + waiting {
            holders.push_back(ask_next(&mut pool, &mut out));
        }
        assert_eq!(pool.waiter_count(), waiting);
        bencher.with_inputs(|| ()).bench_local_values(|()| {
            let lease = holders.pop_front().expect("a lease holds a device");
            release(&mut pool, lease, &mut out);
            holders.push_back(ask_next(&mut pool, &mut out));
        });
        assert_eq!(pool.waiter_count(), waiting, "each release let one go and one came");
    }

    /// Explains the last waiter.
    #[divan::bench(args = [1_000, 100_000])]
    fn explain_the_last(bencher: Bencher<'_, '_>, waiting: usize) {
        let mut pool = idle_pool(1_000);
        let (mut out, whole) = (ApplyOutcome::default(), request(RequestedAmount::Whole, PlacementStrategy::LeastUsed));
        let mut last = LeaseId(0);
        for _ in 0..1_000 + waiting {
            last = ask(&mut pool, &whole, &mut out).expect("it may wait");
        }
        bencher.bench_local(|| black_box(pool.explain(last).expect("it waits")));
    }

    #[divan::bench(args = [1_000, 100_000])]
    fn release_finds_next_of_one_owner(bencher: Bencher<'_, '_>, waiting: usize) {
        bench(bencher, 1_000, waiting, 1);
    }

    #[divan::bench(args = [1_000, 100_000])]
    fn release_finds_next_of_100_owners(bencher: Bencher<'_, '_>, waiting: usize) {
        bench(bencher, 1_000, waiting, 100);
    }
}

fn live() -> i64 {
    LIVE.load(Ordering::Relaxed)
}

fn print_sizes() {
    // Cost of each further device, without the fixed cost of the pool and the first decision.
    let bytes = |devices: usize| {
        let before = live();
        let mut pool = idle_pool(devices);
        let mut out = ApplyOutcome::default();
        // The first decision builds the indexes, which count as cost of the devices.
        let first = ask(&mut pool, &request(RequestedAmount::Whole, PlacementStrategy::LeastUsed), &mut out)
            .expect("there is room");
        release(&mut pool, first, &mut out);
        live() - before
    };
    for devices in SIZES {
        let (one, two) = (bytes(devices), bytes(2 * devices));
        println!("bytes per idle device, from {devices:6} to {:6}: {:5}", 2 * devices, (two - one) / devices as i64);
    }

    let mut pool = idle_pool(100_000);
    let mut out = ApplyOutcome::default();
    let fresh = |number: usize| {
        let part = (*request(RequestedAmount::Share(Share(100)), PlacementStrategy::BestFit)).clone();
        Arc::new(Request { worker_id: Some(format!("worker-{number}").into()), ..part })
    };
    ask(&mut pool, &fresh(0), &mut out).expect("there is room");
    let before = live();
    for number in 0..100_000 {
        ask(&mut pool, &fresh(number), &mut out).expect("there is room");
    }
    println!("bytes per active lease, 100000 of them: {:5} (its request included)", (live() - before) / 100_000);
    drop(pool);

    let mut pool = idle_pool(1_000);
    let whole = request(RequestedAmount::Whole, PlacementStrategy::LeastUsed);
    for _ in 0..1_000 {
        ask(&mut pool, &whole, &mut out).expect("there is room");
    }
    let before = live();
    for number in 0..100_000 {
        let one = Arc::new(Request { worker_id: Some(format!("worker-{number}").into()), ..(*whole).clone() });
        ask(&mut pool, &one, &mut out).expect("it waits");
    }
    println!("bytes per waiting lease, 100000 of them: {:5} (its request included)", (live() - before) / 100_000);
    drop(pool);

    let mut pool = idle_pool(1_000);
    for _ in 0..1_000 {
        ask(&mut pool, &whole, &mut out).expect("there is room");
    }
    let no_room = Arc::new(Request { queue: false, ..(*whole).clone() });
    let never = Arc::new(Request { gpus: 64, ..(*whole).clone() });
    for (what, request) in [("no capacity now", &no_room), ("never satisfiable", &never)] {
        ask(&mut pool, request, &mut out).expect_err("it is rejected");
        let before = CALLS.load(Ordering::Relaxed);
        for _ in 0..1_000 {
            ask(&mut pool, request, &mut out).expect_err("it is rejected");
        }
        let calls = CALLS.load(Ordering::Relaxed) - before;
        println!("allocations per rejected request ({what}): {}", calls as f64 / 1_000.0);
    }
}
