//! The lease of a `gpupool run` or `gpupool map` that started this one. A lease of its own could wait for the parent's
//! GPUs, which the parent keeps until this command ends.

use std::time::Duration;

use anyhow::bail;
use gpupool_api::RequestBody;
use gpupool_api::job_environment as job;
use gpupool_api::lease::{LeaseBody, LeaseDevice, LeaseState};
use gpupool_client::AgentClient;
use gpupool_core::OneOrMany;

/// Returns the lease under which this process runs, if it is live and of this agent.
pub(super) async fn lease_of_parent(client: &AgentClient) -> Option<LeaseBody> {
    let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
    let (id, token) = (number(job::LEASE)?, number(job::FENCING_TOKEN)?);
    // An agent that does not know the lease, or does not show it, is not the parent's.
    let lease = client.follow(id, Duration::ZERO).await.ok()?;
    (lease.state == LeaseState::Active && lease.token == Some(token)).then_some(lease)
}

/// Checks that a request asks for no more than the parent's lease has.
pub(super) fn check_fits(body: &RequestBody, parent: &LeaseBody) -> anyhow::Result<()> {
    let gpus = usize::from(body.gpus.unwrap_or(1));
    let has_room = gpus <= parent.devices.iter().filter(|device| covers(device, body)).count();
    if has_room || gpus == 0 {
        return Ok(());
    }
    let have: Vec<String> =
        parent.devices.iter().map(|device| format!("{} of GPU {}", device.fraction, device.gpu_id)).collect();
    bail!(
        "this command runs under lease {}, which has {}, and asks for more; it would wait while it holds that lease: \
         ask for no more than that, request everything in the outer command, or unset {} to request other GPUs",
        parent.id,
        if have.is_empty() { "no GPU".into() } else { have.join(", ") },
        job::LEASE
    )
}

/// Whether a device of the parent's lease has what is requested of each GPU.
fn covers(device: &LeaseDevice, body: &RequestBody) -> bool {
    let has_fraction = match body.fraction {
        Some(fraction) => fraction <= device.fraction,
        None => body.memory_mib.is_some() || body.sharing || device.fraction >= 1.0,
    };
    let select = &body.select;
    let models = match &select.model {
        OneOrMany::One(model) => std::slice::from_ref(model),
        OneOrMany::Many(models) => models.as_slice(),
    };
    has_fraction
        && select.labels.is_empty()
        && select.min_memory_mib.is_none()
        && body.memory_mib.is_none_or(|memory| device.memory_mib.is_some_and(|has| memory <= has))
        && (select.gpu_ids.is_empty() || select.gpu_ids.iter().any(|gpu| gpu.0 == device.gpu_id))
        && (select.uuids.is_empty() || select.uuids.iter().any(|uuid| **uuid == *device.uuid))
        && select.vendor.is_none_or(|vendor| vendor.to_string() == device.vendor)
        && (models.is_empty() || models.iter().any(|model| device.name.contains(&**model)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_request_fits_if_the_parents_lease_has_all_of_it() {
        let parent = |fraction: f64, gpus: u32| -> LeaseBody {
            let device = |id: u32| {
                json!({"gpu_id": id, "uuid": format!("GPU-{id}"), "vendor": "nvidia", "name": "NVIDIA H100",
                       "fraction": fraction, "memory_mib": 40_000})
            };
            serde_json::from_value(json!({
                "id": 7, "state": "active", "owner": "ann", "worker_id": null,
                "devices": (0..gpus).map(device).collect::<Vec<_>>(), "env": {}, "token": 7, "queue_position": null,
                "reason": null, "cause": null, "created_at": "", "granted_at": null, "expires_at": null,
                "revoke_at": null, "ended_at": null, "ttl_secs": 60.0, "priority": 0, "holder": null,
                "draining": false, "labels": {},
            }))
            .unwrap()
        };
        let body = |body: serde_json::Value| -> RequestBody { serde_json::from_value(body).unwrap() };
        let half = parent(0.5, 1);
        for fits in
            [json!({"fraction": 0.5}), json!({"memory_mib": 40_000}), json!({"sharing": true}), json!({"gpus": 0})]
        {
            assert!(check_fits(&body(fits.clone()), &half).is_ok(), "{fits}");
        }
        for (more, part) in [
            (json!({}), "0.5 of GPU 0"),
            (json!({"fraction": 0.6}), "lease 7"),
            (json!({"fraction": 0.1, "memory_mib": 40_001}), "asks for more"),
            (json!({"fraction": 0.5, "gpus": 2}), "GPUPOOL_LEASE"),
            (json!({"fraction": 0.5, "select": {"gpu_ids": [1]}}), "asks for more"),
            (json!({"fraction": 0.5, "select": {"model": "MI300X"}}), "asks for more"),
        ] {
            let error = check_fits(&body(more.clone()), &half).unwrap_err().to_string();
            assert!(error.contains(part), "{more}: {error}");
        }
        assert!(check_fits(&body(json!({"gpus": 2, "select": {"model": "H100"}})), &parent(1.0, 2)).is_ok());
    }
}
