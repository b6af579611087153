//! Tests of client-side accounting under a virtual clock: statistics in `server_reports`, leases in `leases`, and
//! random mixtures in `property`.

mod leases;
mod property;
mod server_reports;

use gpupool_api::lease::LeaseState;
use gpupool_api::stats::{self, GpuSummary};

use super::*;

const MAX_AGE: Duration = Duration::from_secs(25);

/// Creates a summary of GPUs: number, memory % and utilization %.
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

/// Creates statistics of GPUs by number and UUID, of 2000 MiB each.
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

fn accounting(gpus: &[(u32, f64, u32)]) -> ClientAccounting {
    let accounting = ClientAccounting::new("server1", "ann", MAX_AGE);
    accounting.apply_statistics(&summary(gpus), None);
    accounting
}

/// Creates accounting of idle GPUs with these numbers.
fn idle_gpus(numbers: &[u32]) -> ClientAccounting {
    accounting(&numbers.iter().map(|number| (*number, 0.0, 0)).collect::<Vec<_>>())
}

impl ClientAccounting {
    fn request_json(&self, json: &str) -> Result<LeaseBody, ClientError> {
        let body: RequestBody = serde_json::from_str(json).unwrap();
        self.request(&body, &IdempotencyKey::random())
    }

    fn refusal_code(&self, json: &str) -> String {
        let error = self.request_json(json).unwrap_err();
        error.code().unwrap_or_else(|| panic!("{error}")).into()
    }

    fn state_of(&self, lease: &LeaseBody) -> LeaseState {
        self.lease(lease.id).unwrap().state
    }
}

fn gpu_numbers(lease: &LeaseBody) -> Vec<u32> {
    lease.devices.iter().map(|device| device.gpu_id).collect()
}
