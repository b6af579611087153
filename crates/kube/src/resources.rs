//! What the containers of a pod ask for together: GPUs, host CPUs and host memory.
//!
//! Containers count as in Kubernetes: the pod needs the sum of those that run side by side, or what an init container
//! needs beside the sidecars started before it, whichever is more.

use std::collections::BTreeSet;
use std::ops::Add;

use gpupool_core::device::Vendor;
use gpupool_core::{Bytes, MilliCpus};

use crate::error::{KubeError, shown};
use crate::limits::{CPUS, MIN_THOUSANDTHS, SHOWN_CONTAINERS, WHOLE_GPUS};
use crate::pod::{Container, Pod, Resources, Role};
use crate::quantity::Quantity;

const AMD: &str = "amd.com/gpu";
const NVIDIA: &str = "nvidia.com/gpu";
const GPUS_ALLOWED: &str = "1..=16 for whole GPUs, 100..=1000 for thousandths of one GPU, or 0 for none";
const QUANTITY_ALLOWED: &str = "a quantity of at least 0 such as 2, 0.5, 500m, 16Gi or 1e9";

/// What a pod's GPU resource says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AskedGpus {
    /// `amd.com/gpu` or `nvidia.com/gpu`.
    pub(crate) resource: &'static str,
    pub(crate) amount: AskedAmount,
}

/// How much of GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AskedAmount {
    /// 0: none, in so many words.
    None,
    /// 1..=16.
    Whole(u16),
    /// 100..=1000.
    Thousandths(u32),
}

impl AskedGpus {
    pub(crate) fn vendor(&self) -> Vendor {
        if self.resource == AMD { Vendor::Amd } else { Vendor::Nvidia }
    }

    /// The amount as Kubernetes has it.
    pub(crate) fn requested(&self) -> String {
        match self.amount {
            AskedAmount::None => "0".to_owned(),
            AskedAmount::Whole(count) => count.to_string(),
            AskedAmount::Thousandths(count) => count.to_string(),
        }
    }
}

/// One container's GPUs, checked by themselves.
struct Ask<'a> {
    container: &'a Container,
    resource: &'static str,
    count: u64,
}

/// The GPUs the pod's containers ask for; `None` where no container mentions any.
pub(crate) fn gpus(pod: &Pod) -> Result<Option<AskedGpus>, KubeError> {
    if let Some(name) = pod.resources.names().into_iter().find(|name| is_gpu(name)) {
        let allowed = "on a container; a pod as a whole asks only for cpu and memory";
        return Err(KubeError::Field { path: "spec.resources".to_owned(), value: shown(name), allowed });
    }
    let mut asks = Vec::new();
    for container in &pod.containers {
        for name in container.resources.names().into_iter().filter(|name| is_gpu(name)) {
            asks.push(ask(container, name)?);
        }
    }
    let Some(mentioned) = asks.first().map(|ask| ask.resource) else { return Ok(None) };
    asks.retain(|ask| ask.count > 0);
    let Some(resource) = asks.first().map(|ask| ask.resource) else {
        return Ok(Some(AskedGpus { resource: mentioned, amount: AskedAmount::None }));
    };
    if asks.iter().any(|ask| ask.resource != resource) {
        return Err(together(&format!("{AMD}, {NVIDIA}"), &asks, "a pod uses the GPUs of one vendor"));
    }
    let amount = if asks.iter().all(|ask| ask.count <= WHOLE_GPUS) {
        AskedAmount::Whole(whole(resource, &asks)?)
    } else {
        AskedAmount::Thousandths(thousandths(resource, &asks)?)
    };
    Ok(Some(AskedGpus { resource, amount }))
}

/// Whether a resource is a GPU or a part of one, ours or not: calling such a pod free of GPUs would be a lie.
fn is_gpu(name: &str) -> bool {
    ["amd.com/", NVIDIA, "nvidia.com/mig-", "gpu.intel.com/"].iter().any(|prefix| name.starts_with(prefix))
}

fn ask<'a>(container: &'a Container, name: &str) -> Result<Ask<'a>, KubeError> {
    let refuse = |value: &str, allowed| KubeError::Resource {
        container: container.name.clone(),
        resource: shown(name),
        value: shown(value),
        allowed,
    };
    let Resources { requests, limits } = &container.resources;
    let (request, limit) = (requests.get(name), limits.get(name));
    let text = limit.or(request).map_or("0", String::as_str);
    let Some(resource) = [AMD, NVIDIA].into_iter().find(|known| *known == name) else {
        return Err(refuse(text, "asked for as amd.com/gpu or nvidia.com/gpu"));
    };
    let count = |text: &String| gpu_count(text).ok_or_else(|| refuse(text, GPUS_ALLOWED));
    let (requested, limited) = (request.map(count).transpose()?, limit.map(count).transpose()?);
    match (requested, limited) {
        (Some(requested), Some(limited)) if requested != limited => {
            Err(refuse(&format!("{requested} in requests, {limited} in limits"), "the same in requests and limits"))
        }
        _ => Ok(Ask { container, resource, count: limited.or(requested).unwrap_or(0) }),
    }
}

fn gpu_count(text: &str) -> Option<u64> {
    let count = u64::try_from(text.parse::<Quantity>().ok()?.whole()?).ok()?;
    let allowed = count <= WHOLE_GPUS || (MIN_THOUSANDTHS..=1000).contains(&count);
    allowed.then_some(count)
}

fn whole(resource: &str, asks: &[Ask<'_>]) -> Result<u16, KubeError> {
    let total = total(asks.iter().map(|ask| (ask.container.role, ask.count)));
    match u16::try_from(total) {
        Ok(count) if total <= WHOLE_GPUS => Ok(count),
        _ => Err(together(resource, asks, "the containers of a pod may have 16 whole GPUs together")),
    }
}

/// Parts of a GPU do not add up across containers: nothing says that two halves are of the same GPU.
fn thousandths(resource: &str, asks: &[Ask<'_>]) -> Result<u32, KubeError> {
    if asks.iter().any(|ask| ask.count <= WHOLE_GPUS) {
        return Err(together(
            resource,
            asks,
            "a pod asks either for whole GPUs or for thousandths of one, not for both",
        ));
    }
    let one_at_a_time = "only one container at a time may ask for thousandths of a GPU";
    let (inits, apps): (Vec<_>, Vec<_>) = asks.iter().partition(|ask| ask.container.role == Role::Init);
    let sidecar = asks.iter().position(|ask| ask.container.role == Role::Sidecar);
    let beside_sidecar = sidecar.is_some_and(|at| asks[at..].iter().any(|ask| ask.container.role == Role::Init));
    if apps.len() > 1 || beside_sidecar {
        return Err(together(resource, asks, one_at_a_time));
    }
    let most = inits.into_iter().chain(apps).map(|ask| ask.count).max().unwrap_or(0);
    Ok(u32::try_from(most).unwrap_or(u32::MAX))
}

fn together(resource: &str, asks: &[Ask<'_>], allowed: &'static str) -> KubeError {
    let who = |ask: &Ask<'_>| format!("container {} asks for {} {}", ask.container.name, ask.count, ask.resource);
    let mut each: Vec<String> = asks.iter().take(SHOWN_CONTAINERS).map(who).collect();
    if asks.len() > SHOWN_CONTAINERS {
        each.push(format!("and {} more", asks.len() - SHOWN_CONTAINERS));
    }
    KubeError::Together { resource: resource.to_owned(), value: each.join(", "), allowed }
}

/// The host's CPUs and memory that the pod needs.
pub(crate) fn host(pod: &Pod) -> Result<(MilliCpus, Bytes), KubeError> {
    let too_much = |resource: &str, allowed| {
        let value = "the sum over the containers".to_owned();
        KubeError::Together { resource: resource.to_owned(), value, allowed }
    };
    let cpus = needed(pod, "cpu")?.thousandths_up();
    let memory = needed(pod, "memory")?.units_up();
    if cpus > u128::from(CPUS) * 1000 {
        return Err(too_much("cpu", "it must be at most 1000000000"));
    }
    if memory > i64::MAX as u128 {
        return Err(too_much("memory", "it must be at most 9223372036854775807 bytes"));
    }
    Ok((MilliCpus(cpus as u64), Bytes(memory as u64)))
}

/// What Kubernetes would schedule by: requests, or limits where there is no request; the pod's own before the sum.
fn needed(pod: &Pod, resource: &str) -> Result<Quantity, KubeError> {
    if let Some(text) = pod.resources.requests.get(resource) {
        return amount("(the pod as a whole)", resource, text);
    }
    let mut parts = Vec::new();
    for container in &pod.containers {
        let Resources { requests, limits } = &container.resources;
        if let Some(text) = requests.get(resource).or_else(|| limits.get(resource)) {
            parts.push((container.role, amount(&container.name, resource, text)?));
        }
    }
    match pod.resources.limits.get(resource) {
        Some(text) if parts.is_empty() => amount("(the pod as a whole)", resource, text),
        _ => Ok(total(parts.into_iter())),
    }
}

fn amount(container: &str, resource: &str, text: &str) -> Result<Quantity, KubeError> {
    text.parse().ok().filter(|quantity: &Quantity| !quantity.is_negative()).ok_or_else(|| KubeError::Resource {
        container: container.to_owned(),
        resource: resource.to_owned(),
        value: shown(text),
        allowed: QUANTITY_ALLOWED,
    })
}

/// What a pod needs at its peak. Init containers and sidecars come first, in the order they start.
fn total<T: Copy + Default + Ord + Add<Output = T>>(parts: impl Iterator<Item = (Role, T)>) -> T {
    let (mut running, mut peak) = (T::default(), T::default());
    for (role, part) in parts {
        match role {
            Role::Init => peak = peak.max(running + part),
            Role::Sidecar | Role::App => running = running + part,
        }
    }
    peak.max(running)
}

impl Resources {
    fn names(&self) -> BTreeSet<&str> {
        self.requests.keys().chain(self.limits.keys()).map(String::as_str).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn pod(containers: &[(Role, &str, &str)]) -> Pod {
        let container = |(index, (role, resource, value)): (usize, &(Role, &str, &str))| Container {
            name: format!("c{index}"),
            role: *role,
            resources: Resources {
                requests: BTreeMap::new(),
                limits: BTreeMap::from([((*resource).to_owned(), (*value).to_owned())]),
            },
        };
        Pod {
            annotations: BTreeMap::new(),
            labels: BTreeMap::new(),
            containers: containers.iter().enumerate().map(container).collect(),
            resources: Resources::default(),
            priority: 0,
            deadline_secs: None,
        }
    }

    fn asked(containers: &[(Role, &str, &str)]) -> Result<Option<AskedAmount>, String> {
        gpus(&pod(containers)).map(|asked| asked.map(|asked| asked.amount)).map_err(|error| error.to_string())
    }

    #[test]
    fn one_to_sixteen_are_whole_gpus_and_hundred_to_thousand_are_thousandths() {
        for (text, amount) in [
            ("0", AskedAmount::None),
            ("1", AskedAmount::Whole(1)),
            ("16", AskedAmount::Whole(16)),
            ("2000m", AskedAmount::Whole(2)),
            ("100", AskedAmount::Thousandths(100)),
            ("1000", AskedAmount::Thousandths(1000)),
            ("1e3", AskedAmount::Thousandths(1000)),
        ] {
            assert_eq!(asked(&[(Role::App, AMD, text)]), Ok(Some(amount)), "{text}");
        }
        for text in ["17", "99", "1001", "-1", "0.5", "500m", "1Gi", "one", ""] {
            let error = asked(&[(Role::App, NVIDIA, text)]).unwrap_err();
            assert!(error.contains(NVIDIA) && error.contains("100..=1000") && error.contains("c0"), "{text}: {error}");
        }
    }

    #[test]
    fn whole_gpus_of_containers_add_up_and_an_init_container_counts_by_itself() {
        let whole = |containers: &[(Role, &str, &str)]| asked(containers).unwrap();
        assert_eq!(whole(&[(Role::App, AMD, "2"), (Role::App, AMD, "3")]), Some(AskedAmount::Whole(5)));
        assert_eq!(whole(&[(Role::Init, AMD, "4"), (Role::App, AMD, "3")]), Some(AskedAmount::Whole(4)));
        assert_eq!(whole(&[(Role::Sidecar, AMD, "1"), (Role::App, AMD, "3")]), Some(AskedAmount::Whole(4)));
        assert_eq!(
            whole(&[(Role::Sidecar, AMD, "1"), (Role::Init, AMD, "4"), (Role::App, AMD, "3")]),
            Some(AskedAmount::Whole(5))
        );
        assert_eq!(
            whole(&[(Role::Init, AMD, "4"), (Role::Sidecar, AMD, "1"), (Role::App, AMD, "2")]),
            Some(AskedAmount::Whole(4))
        );
        assert!(asked(&[(Role::App, AMD, "9"), (Role::App, AMD, "8")]).unwrap_err().contains("16 whole GPUs"));
    }

    #[test]
    fn thousandths_belong_to_one_container_at_a_time() {
        let halves = asked(&[(Role::App, AMD, "500"), (Role::App, AMD, "250")]).unwrap_err();
        assert!(
            halves.contains("container c0 asks for 500") && halves.contains("container c1 asks for 250"),
            "{halves}"
        );
        assert!(asked(&[(Role::Sidecar, AMD, "500"), (Role::Init, AMD, "500")]).is_err());
        assert!(asked(&[(Role::App, AMD, "500"), (Role::App, AMD, "1")]).is_err());
        let one = asked(&[(Role::Init, AMD, "250"), (Role::Init, AMD, "700"), (Role::App, AMD, "500")]);
        assert_eq!(one, Ok(Some(AskedAmount::Thousandths(700))));
    }

    #[test]
    fn two_vendors_and_parts_we_do_not_lease_are_refused_by_name() {
        let two = asked(&[(Role::App, AMD, "1"), (Role::App, NVIDIA, "1")]).unwrap_err();
        assert!(two.contains(AMD) && two.contains(NVIDIA) && two.contains("one vendor"), "{two}");
        assert_eq!(asked(&[(Role::App, AMD, "0"), (Role::App, NVIDIA, "1")]), Ok(Some(AskedAmount::Whole(1))));
        for name in ["nvidia.com/mig-1g.10gb", "nvidia.com/gpu.shared", "amd.com/cpx_nps4", "gpu.intel.com/i915"] {
            assert!(asked(&[(Role::App, name, "1")]).unwrap_err().contains(name));
        }
        assert_eq!(asked(&[(Role::App, "nvidia.com/hostdev", "1")]), Ok(None));
    }

    #[test]
    fn host_resources_are_summed_exactly_and_rounded_up_once() {
        let cpus = pod(&[(Role::App, "cpu", "0.1m"), (Role::App, "cpu", "0.1m"), (Role::App, "cpu", "1")]);
        assert_eq!(host(&cpus), Ok((MilliCpus(1001), Bytes::ZERO)));
        let memory = pod(&[(Role::Init, "memory", "1Gi"), (Role::App, "memory", "0.5"), (Role::App, "memory", "0.5")]);
        assert_eq!(host(&memory), Ok((MilliCpus::ZERO, Bytes(1 << 30))));
        let error = host(&pod(&[(Role::App, "memory", "-1")])).unwrap_err().to_string();
        assert!(error.contains("memory") && error.contains("-1"), "{error}");
        assert!(host(&pod(&[(Role::App, "cpu", "1e10")])).is_err());
        assert!(host(&pod(&[(Role::App, "memory", "8Ei"), (Role::App, "memory", "1")])).is_err());
    }
}
