//! Cost of node reports: heartbeats and readings of a fleet, and the registration of a large node.
//!
//! `cargo bench -p gpupool-core --bench reports`. A plain table comes first, then divan's timings of the same work.

use std::sync::Arc;
use std::time::{Duration, Instant};

use divan::{Bencher, black_box};
use gpupool_core::{
    Bytes, CommandReply, DeviceFacts, DeviceId, DeviceIdentity, DeviceMemory, DeviceReading, DrainMode,
    IsolationSupport, LeaseId, LoadThresholds, MilliCpus, Millis, NodeFacts, Percent, Policies, Pool, PoolCommand,
    PoolSettings, PoolTime, ProcessAttribution, ProcessUsage, ReadingField, Request, RequestedAmount, Share, Vendor,
};

const NODES: usize = 1_000;
const GPUS_PER_NODE: usize = 8;
const DEVICES: usize = NODES * GPUS_PER_NODE;
const GIB: u64 = 1 << 30;
const MEMORY_GIB: u64 = 80;
/// One device in this many is free and used by a process without a lease.
const SQUATTED: usize = 10;
/// The foreign load of one device in this many changes every second.
const CHANGING: usize = 10;

fn main() {
    print_table();
    divan::Divan::from_args().main();
}

fn device(node: usize, number: usize) -> DeviceFacts {
    DeviceFacts {
        identity: DeviceIdentity::Uuid(format!("GPU-{node:08x}-0000-0000-0000-{number:012x}").into()),
        vendor: Vendor::Nvidia,
        model: "NVIDIA H100 80GB HBM3".into(),
        memory: Some(DeviceMemory { total: Bytes(MEMORY_GIB * GIB), reserved: Bytes::ZERO }),
        partition: None,
        isolation: IsolationSupport::BASIC,
        labels: Default::default(),
    }
}

fn node_facts(node: usize) -> NodeFacts {
    NodeFacts {
        name: format!("node-{node:04}.cluster.example.org").into(),
        cpus: MilliCpus(128_000),
        memory: Bytes(1 << 40),
        labels: [("zone".into(), format!("zone-{}", node % 3).into())].into(),
    }
}

fn registration(node: usize, devices: usize) -> PoolCommand {
    let listed = (0..devices).map(|number| device(node, number)).collect();
    PoolCommand::NodeSeen { facts: node_facts(node), devices: listed, numbers: Vec::new() }
}

/// Fleet in which leases hold every device whole, except those with foreign processes, and requests wait.
struct ReportingFleet {
    pool: Pool,
    now: PoolTime,
    /// Lease that holds each device.
    holders: Vec<Option<LeaseId>>,
    waiters: Vec<LeaseId>,
    /// GiB of foreign memory and percent of foreign load on each device.
    loads: Vec<(u64, u32)>,
    random: u64,
}

impl ReportingFleet {
    fn new(waiters: usize) -> Self {
        let settings = PoolSettings {
            drain: DrainMode::WhenGone { patience: Millis::from_secs(60) },
            reading_max_age: Some(Millis::from_secs(30)),
        };
        let mut fleet = Self {
            pool: Pool::new(settings, Policies::unlimited()),
            now: PoolTime(1_000),
            holders: vec![None; DEVICES],
            waiters: Vec::new(),
            loads: (0..DEVICES).map(|number| if number % SQUATTED == 0 { (70, 95) } else { (0, 0) }).collect(),
            random: 1,
        };
        for node in 0..NODES {
            fleet.pool.apply_all(fleet.now, [registration(node, GPUS_PER_NODE)]);
        }
        fleet.report(&mut |_| ());
        for number in 0..DEVICES - DEVICES.div_ceil(SQUATTED) {
            let holder = Request { owner: format!("holder-{}", number % 50).into(), ..waiter(0) };
            let lease = fleet.ask(Request { max_duration: None, ..holder });
            let promises = &fleet.pool.lease(lease).expect("it was just granted").promises;
            fleet.holders[promises[0].device.0 as usize] = Some(lease);
        }
        fleet.waiters = (0..waiters).map(|number| fleet.ask(waiter(number))).collect();
        assert_eq!(fleet.pool.waiter_count(), waiters);
        fleet
    }

    fn ask(&mut self, request: Request) -> LeaseId {
        let command = PoolCommand::Request { request: Arc::new(request), key: None, by_admin: false };
        match self.pool.apply(self.now, command).0 {
            Ok(CommandReply::Lease(lease)) => lease,
            other => panic!("a request is answered with a lease, not {other:?}"),
        }
    }

    fn random(&mut self, below: u64) -> u64 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) % below
    }

    /// Advances by a second: one device in ten gets another foreign load, and the waiters send a heartbeat.
    fn pass_a_second(&mut self) {
        self.now = self.now.after(Millis(1_000));
        for _ in 0..DEVICES / CHANGING {
            let number = self.random(DEVICES as u64) as usize;
            // A device with foreign processes stays above the thresholds, or a waiter would get it.
            self.loads[number] = match self.holders[number] {
                None => (66 + self.random(14), self.random(101) as u32),
                Some(_) => (self.random(40), self.random(101) as u32),
            };
        }
        let asking = self.waiters.iter().map(|lease| PoolCommand::Follow { lease: *lease });
        self.pool.apply_all(self.now, asking);
    }

    /// Every node reports in a batch of its own: a heartbeat and a reading of each device.
    fn report(&mut self, timed: &mut dyn FnMut(Duration)) {
        for node in 0..NODES {
            let heartbeat = PoolCommand::NodeSeen { facts: node_facts(node), devices: Vec::new(), numbers: Vec::new() };
            let devices = node * GPUS_PER_NODE..(node + 1) * GPUS_PER_NODE;
            let readings = devices
                .map(|number| PoolCommand::Observe { device: DeviceId(number as u32), reading: self.reading(number) });
            let commands: Vec<PoolCommand> = [heartbeat].into_iter().chain(readings).collect();
            let start = Instant::now();
            let (_, outcome) = black_box(self.pool.apply_all(self.now, commands));
            timed(start.elapsed());
            drop(outcome);
        }
    }

    fn reading(&self, number: usize) -> DeviceReading {
        let (foreign_gib, busy) = self.loads[number];
        let process = |attribution, gib: u64| ProcessUsage { attribution, memory: Some(Bytes(gib * GIB)) };
        let own = self.holders[number].map(|lease| process(ProcessAttribution::Lease(lease), 40));
        let foreign = (foreign_gib > 0).then(|| process(ProcessAttribution::Foreign, foreign_gib));
        let used = foreign_gib + if own.is_some() { 40 } else { 0 };
        DeviceReading {
            memory_used: ReadingField::Value(Bytes(used * GIB)),
            utilization: ReadingField::Value(Percent(busy * 1_000)),
            processes: Some(own.into_iter().chain(foreign).collect()),
            ..DeviceReading::idle(self.now)
        }
    }

    /// Returns the time that the pool takes for the reports of one second.
    fn second(&mut self) -> Duration {
        let mut spent = Duration::ZERO;
        self.pass_a_second();
        self.report(&mut |took| spent += took);
        assert_eq!(self.pool.waiter_count(), self.waiters.len(), "the same requests wait");
        spent
    }
}

/// Returns a request of one of ten kinds and a hundred owners, all with thresholds: wholes and parts, some by memory,
/// some with CPUs, some with a certain end.
fn waiter(number: usize) -> Request {
    let kind = number % 10;
    Request {
        owner: format!("owner-{}", number / 10 % 100).into(),
        amount: match kind {
            1 | 2 => RequestedAmount::Share(Share(250 * kind as u32)),
            8 => RequestedAmount::Share(Share(300)),
            3 => RequestedAmount::Memory(Bytes(20 * GIB)),
            _ => RequestedAmount::Whole,
        },
        gpus: if kind == 4 { 2 } else { 1 },
        cpus: MilliCpus(if kind == 5 { 4_000 } else { 0 }),
        max_duration: (kind >= 8).then_some(Millis::from_mins(kind as u64)),
        thresholds: Some(LoadThresholds::default()),
        ttl: Millis::from_secs(86_400),
        ..Request::default()
    }
}

const WAITERS: [usize; 2] = [0, 1_000];

#[divan::bench(args = WAITERS, sample_count = 10, sample_size = 1)]
fn a_second_of_reports_of_1000_nodes(bencher: Bencher<'_, '_>, waiters: usize) {
    let mut fleet = ReportingFleet::new(waiters);
    bencher.bench_local(|| fleet.second());
}

#[divan::bench(args = [8, 5_000], sample_count = 10, sample_size = 1)]
fn a_node_registers(bencher: Bencher<'_, '_>, devices: usize) {
    let empty = || (Pool::new(PoolSettings::default(), Policies::unlimited()), registration(0, devices));
    bencher.with_inputs(empty).bench_local_values(|(mut pool, command)| {
        let outcome = pool.apply_all(PoolTime(0), [command]);
        (pool, outcome)
    });
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

fn print_table() {
    println!("{NODES} nodes with {GPUS_PER_NODE} GPUs each report once a second, each in a batch of its own.");
    println!("The foreign load of one GPU in {CHANGING} changes every second.\n");
    println!("{:>8}  {:>20}  {:>9}", "waiters", "CPU in a second", "of a core");
    for waiters in WAITERS {
        let mut fleet = ReportingFleet::new(waiters);
        let spent = median((0..9).map(|_| fleet.second()).collect());
        println!("{waiters:>8}  {:>17.1} ms  {:>7.2} %", spent.as_secs_f64() * 1e3, spent.as_secs_f64() * 100.0);
    }
    println!("\n{:>8}  {:>20}  {:>20}", "devices", "a node registers", "and a first request");
    for devices in [8, 1_000, 5_000] {
        let (mut registering, mut asking) = (Vec::new(), Vec::new());
        for _ in 0..5 {
            let mut pool = Pool::new(PoolSettings::default(), Policies::unlimited());
            let command = registration(0, devices);
            let start = Instant::now();
            pool.apply_all(PoolTime(0), [command]);
            registering.push(start.elapsed());
            let request = PoolCommand::Request { request: Arc::new(Request::default()), key: None, by_admin: false };
            let start = Instant::now();
            let (answers, _) = pool.apply_all(PoolTime(0), [request]);
            asking.push(start.elapsed());
            assert!(answers[0].is_ok(), "{answers:?}");
        }
        let [registering, asking] = [registering, asking].map(|times| median(times).as_secs_f64() * 1e3);
        println!("{devices:>8}  {registering:>17.2} ms  {asking:>17.2} ms");
    }
    println!();
}
