//! Each promise of the books once, under a clock that only the tests move: what a server says in `server`, what becomes of
//! leases in `leases`, and everything mixed in `property`.

mod leases;
mod property;
mod server;

use gpupool_api::lease::LeaseState;
use gpupool_api::stats::{self, GpuSummary};

use super::*;

const MAX_AGE: Duration = Duration::from_secs(25);

/// A server with these GPUs: number, memory % and utilization %.
fn summary(gpus: &[(u32, f64, u32)]) -> SummaryBody {
    let gpu = |&(gpu_id, memory_usage_percent, utilization_percent): &(u32, f64, u32)| GpuSummary {
        gpu_id,
        name: "NVIDIA A100".into(),
        memory_usage_percent,
        utilization_percent,
        unsupported: Vec::new(),
    };
    SummaryBody {
        gpu_count: gpus.len(),
        total_memory_mb: gpus.len() as u64 * 1000,
        total_used_memory_mb: 0,
        total_memory_usage_percent: 0.0,
        average_utilization_percent: 0.0,
        average_over: 0,
        gpus_summary: gpus.iter().map(gpu).collect(),
        timestamp: String::new(),
        stale: false,
        error: None,
    }
}

/// Statistics of GPUs by number and UUID, of 2000 MiB each.
fn stats(gpus: &[(u32, &str)]) -> StatsBody {
    let gpu = |&(gpu_id, uuid): &(u32, &str)| stats::GpuBody {
        gpu_id,
        name: "NVIDIA A100".into(),
        memory: stats::GpuMemory {
            total_mb: 2000,
            used_mb: 0,
            free_mb: 2000,
            usage_percent: 0.0,
            reserved_mb: Some(100),
            host_total_mb: None,
            host_used_mb: None,
        },
        utilization_percent: 0,
        temperature_c: Some(40),
        power: stats::GpuPower { draw_w: None, limit_w: None },
        uuid: Some(uuid.into()),
        vendor: "nvidia".into(),
        health: String::new(),
        health_reason: None,
        stale: false,
        timestamp: String::new(),
        asleep: false,
        unsupported: Vec::new(),
    };
    let (gpu_count, gpus) = (gpus.len(), gpus.iter().map(gpu).collect());
    StatsBody { gpu_count, gpus, timestamp: String::new(), stale: false, error: None }
}

fn books(gpus: &[(u32, f64, u32)]) -> Books {
    let books = Books::new("server1", "ann", MAX_AGE);
    books.take_in(&summary(gpus), None);
    books
}

/// Idle GPUs with these numbers.
fn idle(numbers: &[u32]) -> Books {
    books(&numbers.iter().map(|number| (*number, 0.0, 0)).collect::<Vec<_>>())
}

impl Books {
    fn ask(&self, json: &str) -> Result<LeaseBody, ClientError> {
        let body: RequestBody = serde_json::from_str(json).unwrap();
        self.request(&body, &IdempotencyKey::random())
    }

    fn code(&self, json: &str) -> String {
        let refused = self.ask(json).unwrap_err();
        refused.code().unwrap_or_else(|| panic!("{refused}")).into()
    }

    fn state_of(&self, lease: &LeaseBody) -> LeaseState {
        self.lease(lease.id).unwrap().state
    }
}

fn numbers(lease: &LeaseBody) -> Vec<u32> {
    lease.devices.iter().map(|device| device.gpu_id).collect()
}
