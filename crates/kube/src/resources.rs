//! GPUs, host CPUs and host memory of a pod's containers together.
//!
//! Containers count as in Kubernetes: a pod needs the sum of the containers that run concurrently, or the needs of an
//! init container plus the sidecars started before it, whichever is more.

use std::collections::BTreeSet;
use std::ops::Add;
use std::str::FromStr;

use gpupool_core::{Bytes, MilliCpus, Vendor};

use crate::error::{KubeError, shortened};
use crate::limits::{MAX_CPUS, MAX_QUANTITY_DIGITS, MAX_SHOWN_CONTAINERS, MAX_WHOLE_GPUS, MIN_THOUSANDTHS};
use crate::pod::{ContainerRole, PodContainer, PodFields, ResourceAmounts};

const AMD: &str = "amd.com/gpu";
const NVIDIA: &str = "nvidia.com/gpu";
const GPUS_ALLOWED: &str = "1..=16 for whole GPUs, 100..=1000 for thousandths of one GPU, or 0 for none";
const QUANTITY_ALLOWED: &str = "a quantity of at least 0 such as 2, 0.5, 500m, 16Gi or 1e9";

/// GPU resource of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GpuResource {
    /// Name: `amd.com/gpu` or `nvidia.com/gpu`.
    pub(crate) name: &'static str,
    pub(crate) amount: ResourceAmount,
}

/// Amount of a GPU resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ResourceAmount {
    /// Explicitly none: 0.
    None,
    /// Whole GPUs: 1..=16.
    Whole(u16),
    /// Thousandths of one GPU: 100..=1000.
    Thousandths(u32),
}

impl GpuResource {
    pub(crate) fn vendor(&self) -> Vendor {
        if self.name == AMD { Vendor::Amd } else { Vendor::Nvidia }
    }

    /// Formats the amount as in the manifest.
    pub(crate) fn requested(&self) -> String {
        match self.amount {
            ResourceAmount::None => "0".to_owned(),
            ResourceAmount::Whole(count) => count.to_string(),
            ResourceAmount::Thousandths(count) => count.to_string(),
        }
    }
}

/// GPU resource of one container.
struct ContainerGpus<'a> {
    container: &'a PodContainer,
    resource: &'static str,
    count: u64,
}

/// Returns the GPU resource of the pod; `None` if no container mentions one.
pub(crate) fn pod_gpus(pod: &PodFields) -> Result<Option<GpuResource>, KubeError> {
    if let Some(name) = pod.resources.names().into_iter().find(|name| is_gpu_resource(name)) {
        let allowed = "on a container; resources of the whole pod are only cpu and memory";
        return Err(KubeError::Field { path: "spec.resources".to_owned(), value: shortened(name), allowed });
    }
    let mut requests = Vec::new();
    for container in &pod.containers {
        for name in container.resources.names().into_iter().filter(|name| is_gpu_resource(name)) {
            requests.push(parse_container_gpus(container, name)?);
        }
    }
    let Some(mentioned) = requests.first().map(|gpus| gpus.resource) else { return Ok(None) };
    requests.retain(|gpus| gpus.count > 0);
    let Some(resource) = requests.first().map(|gpus| gpus.resource) else {
        return Ok(Some(GpuResource { name: mentioned, amount: ResourceAmount::None }));
    };
    if requests.iter().any(|gpus| gpus.resource != resource) {
        return Err(combined_error(&format!("{AMD}, {NVIDIA}"), &requests, "a pod can use GPUs of only one vendor"));
    }
    let amount = if requests.iter().all(|gpus| gpus.count <= MAX_WHOLE_GPUS) {
        ResourceAmount::Whole(sum_whole_gpus(resource, &requests)?)
    } else {
        ResourceAmount::Thousandths(single_fraction(resource, &requests)?)
    };
    Ok(Some(GpuResource { name: resource, amount }))
}

/// Returns whether a resource is a GPU or a part of one, also if we do not support it: such a pod does need a GPU.
fn is_gpu_resource(name: &str) -> bool {
    ["amd.com/", NVIDIA, "nvidia.com/mig-", "gpu.intel.com/"].iter().any(|prefix| name.starts_with(prefix))
}

fn parse_container_gpus<'a>(container: &'a PodContainer, name: &str) -> Result<ContainerGpus<'a>, KubeError> {
    let refuse = |value: &str, allowed| KubeError::Resource {
        container: container.name.clone(),
        resource: shortened(name),
        value: shortened(value),
        allowed,
    };
    let ResourceAmounts { requests, limits } = &container.resources;
    let (request, limit) = (requests.get(name), limits.get(name));
    let text = limit.or(request).map_or("0", String::as_str);
    let Some(resource) = [AMD, NVIDIA].into_iter().find(|known| *known == name) else {
        return Err(refuse(text, "requested as amd.com/gpu or nvidia.com/gpu"));
    };
    let count = |text: &String| parse_gpu_count(text).ok_or_else(|| refuse(text, GPUS_ALLOWED));
    let (requested, limited) = (request.map(count).transpose()?, limit.map(count).transpose()?);
    match (requested, limited) {
        (Some(requested), Some(limited)) if requested != limited => {
            Err(refuse(&format!("{requested} in requests, {limited} in limits"), "the same in requests and limits"))
        }
        _ => Ok(ContainerGpus { container, resource, count: limited.or(requested).unwrap_or(0) }),
    }
}

fn parse_gpu_count(text: &str) -> Option<u64> {
    let count = u64::try_from(text.parse::<Quantity>().ok()?.whole()?).ok()?;
    let allowed = count <= MAX_WHOLE_GPUS || (MIN_THOUSANDTHS..=1000).contains(&count);
    allowed.then_some(count)
}

fn sum_whole_gpus(resource: &str, requests: &[ContainerGpus<'_>]) -> Result<u16, KubeError> {
    let total = peak_amount(requests.iter().map(|gpus| (gpus.container.role, gpus.count)));
    match u16::try_from(total) {
        Ok(count) if total <= MAX_WHOLE_GPUS => Ok(count),
        _ => Err(combined_error(
            resource,
            requests,
            "the containers of a pod can request at most 16 whole GPUs together",
        )),
    }
}

/// Returns the fraction that a single container requests. Fractions of several containers do not add up: they need not
/// be of the same GPU.
fn single_fraction(resource: &str, requests: &[ContainerGpus<'_>]) -> Result<u32, KubeError> {
    if requests.iter().any(|gpus| gpus.count <= MAX_WHOLE_GPUS) {
        return Err(combined_error(
            resource,
            requests,
            "a pod can request either whole GPUs or thousandths of one, not both",
        ));
    }
    let one_at_a_time = "only one container at a time can request thousandths of a GPU";
    let (inits, apps): (Vec<_>, Vec<_>) = requests.iter().partition(|gpus| gpus.container.role == ContainerRole::Init);
    let sidecar = requests.iter().position(|gpus| gpus.container.role == ContainerRole::Sidecar);
    let beside_sidecar =
        sidecar.is_some_and(|at| requests[at..].iter().any(|gpus| gpus.container.role == ContainerRole::Init));
    if apps.len() > 1 || beside_sidecar {
        return Err(combined_error(resource, requests, one_at_a_time));
    }
    let most = inits.into_iter().chain(apps).map(|gpus| gpus.count).max().unwrap_or(0);
    Ok(u32::try_from(most).unwrap_or(u32::MAX))
}

fn combined_error(resource: &str, requests: &[ContainerGpus<'_>], allowed: &'static str) -> KubeError {
    let describe = |gpus: &ContainerGpus<'_>| {
        format!("container {} requests {} {}", gpus.container.name, gpus.count, gpus.resource)
    };
    let mut each: Vec<String> = requests.iter().take(MAX_SHOWN_CONTAINERS).map(describe).collect();
    if requests.len() > MAX_SHOWN_CONTAINERS {
        each.push(format!("and {} more", requests.len() - MAX_SHOWN_CONTAINERS));
    }
    KubeError::CombinedResources { resource: resource.to_owned(), value: each.join(", "), allowed }
}

/// Returns the host CPUs and memory of the pod.
pub(crate) fn host_resources(pod: &PodFields) -> Result<(MilliCpus, Bytes), KubeError> {
    let too_much = |resource: &str, allowed| {
        let value = "the sum over the containers".to_owned();
        KubeError::CombinedResources { resource: resource.to_owned(), value, allowed }
    };
    let cpus = scheduled_amount(pod, "cpu")?.thousandths_up();
    let memory = scheduled_amount(pod, "memory")?.units_up();
    if cpus > u128::from(MAX_CPUS) * 1000 {
        return Err(too_much("cpu", "it must be at most 1000000000"));
    }
    if memory > i64::MAX as u128 {
        return Err(too_much("memory", "it must be at most 9223372036854775807 bytes"));
    }
    Ok((MilliCpus(cpus as u64), Bytes(memory as u64)))
}

/// Returns the amount that Kubernetes schedules by: requests, or limits without requests; those of the pod replace the
/// sum.
fn scheduled_amount(pod: &PodFields, resource: &str) -> Result<Quantity, KubeError> {
    if let Some(text) = pod.resources.requests.get(resource) {
        return parse_amount("(the pod as a whole)", resource, text);
    }
    let mut parts = Vec::new();
    for container in &pod.containers {
        let ResourceAmounts { requests, limits } = &container.resources;
        if let Some(text) = requests.get(resource).or_else(|| limits.get(resource)) {
            parts.push((container.role, parse_amount(&container.name, resource, text)?));
        }
    }
    match pod.resources.limits.get(resource) {
        Some(text) if parts.is_empty() => parse_amount("(the pod as a whole)", resource, text),
        _ => Ok(peak_amount(parts.into_iter())),
    }
}

fn parse_amount(container: &str, resource: &str, text: &str) -> Result<Quantity, KubeError> {
    text.parse().ok().filter(|quantity: &Quantity| !quantity.is_negative()).ok_or_else(|| KubeError::Resource {
        container: container.to_owned(),
        resource: resource.to_owned(),
        value: shortened(text),
        allowed: QUANTITY_ALLOWED,
    })
}

/// Returns the peak need of a pod. Init containers and sidecars come first, in the order of their start.
fn peak_amount<T: Copy + Default + Ord + Add<Output = T>>(parts: impl Iterator<Item = (ContainerRole, T)>) -> T {
    let (mut running, mut peak) = (T::default(), T::default());
    for (role, part) in parts {
        match role {
            ContainerRole::Init => peak = peak.max(running + part),
            ContainerRole::Sidecar | ContainerRole::App => running = running + part,
        }
    }
    peak.max(running)
}

impl ResourceAmounts {
    fn names(&self) -> BTreeSet<&str> {
        self.requests.keys().chain(self.limits.keys()).map(String::as_str).collect()
    }
}

// Kubernetes quantities (`500m`, `16Gi`, `1e9`), parsed exactly.
//
// As in Kubernetes, a quantity is a multiple of 10⁻⁹ within ±(2⁶³−1); finer values are rounded away from zero. In two
// cases the parser is stricter: a quantity needs a digit (`Gi` alone is not zero), and at most 20 digits are
// significant.

const NANOS_PER_UNIT: i128 = 1_000_000_000;
const MAX_NANOS: u128 = i64::MAX as u128 * NANOS_PER_UNIT as u128;

/// Amount, exact to a billionth.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Quantity {
    nanos: i128,
}

/// Error: the text is not a quantity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a quantity such as 2, 0.5, 500m, 16Gi or 1e9")]
pub struct InvalidQuantity;

impl Quantity {
    /// Zero.
    pub const ZERO: Self = Self { nanos: 0 };

    /// Returns the exact amount in billionths.
    pub const fn nanos(self) -> i128 {
        self.nanos
    }

    /// Returns whether the quantity is below zero.
    pub const fn is_negative(self) -> bool {
        self.nanos < 0
    }

    /// Returns the quantity as a whole number, if it is one.
    pub const fn whole(self) -> Option<i128> {
        if self.nanos % NANOS_PER_UNIT == 0 { Some(self.nanos / NANOS_PER_UNIT) } else { None }
    }

    /// Returns whole units, rounded up; 0 if negative.
    pub fn units_up(self) -> u128 {
        self.nanos.max(0).unsigned_abs().div_ceil(NANOS_PER_UNIT.unsigned_abs())
    }

    /// Returns thousandths, rounded up; 0 if negative.
    pub fn thousandths_up(self) -> u128 {
        self.nanos.max(0).unsigned_abs().div_ceil(NANOS_PER_UNIT.unsigned_abs() / 1000)
    }
}

impl Add for Quantity {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { nanos: self.nanos.saturating_add(other.nanos) }
    }
}

impl FromStr for Quantity {
    type Err = InvalidQuantity;

    fn from_str(text: &str) -> Result<Self, InvalidQuantity> {
        let text = text.trim();
        let (negative, rest) = match text.strip_prefix('-') {
            Some(rest) => (true, rest),
            None => (false, text.strip_prefix('+').unwrap_or(text)),
        };
        let (digits, suffix) =
            rest.split_at(rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len()));
        let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
        if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
            return Err(InvalidQuantity);
        }
        let scale = QuantityScale::from_suffix(suffix).ok_or(InvalidQuantity)?;
        let nanos = scaled_nanos(whole, fraction, scale)?.min(MAX_NANOS) as i128;
        Ok(Self { nanos: if negative { -nanos } else { nanos } })
    }
}

/// Multiplier of a suffix: 2^twos × 10^tens.
#[derive(Clone, Copy)]
struct QuantityScale {
    twos: u32,
    tens: i64,
}

impl QuantityScale {
    fn from_suffix(suffix: &str) -> Option<Self> {
        let binary = |twos| Some(Self { twos, tens: 0 });
        let decimal = |tens| Some(Self { twos: 0, tens });
        match suffix {
            "Ki" => binary(10),
            "Mi" => binary(20),
            "Gi" => binary(30),
            "Ti" => binary(40),
            "Pi" => binary(50),
            "Ei" => binary(60),
            "n" => decimal(-9),
            "u" => decimal(-6),
            "m" => decimal(-3),
            "" => decimal(0),
            "k" => decimal(3),
            "M" => decimal(6),
            "G" => decimal(9),
            "T" => decimal(12),
            "P" => decimal(15),
            "E" => decimal(18),
            _ => decimal(suffix.strip_prefix(['e', 'E'])?.parse().ok()?),
        }
    }
}

/// Returns the absolute value in billionths, rounded up, or any value above [`MAX_NANOS`] if it is larger.
fn scaled_nanos(whole: &str, fraction: &str, scale: QuantityScale) -> Result<u128, InvalidQuantity> {
    let all = format!("{whole}{fraction}");
    let counted = all.trim_start_matches('0').trim_end_matches('0');
    if counted.is_empty() {
        return Ok(0);
    }
    if counted.len() > MAX_QUANTITY_DIGITS {
        return Err(InvalidQuantity);
    }
    let trailing_zeros = all.len() - all.trim_end_matches('0').len();
    let mantissa: u128 = counted.parse().map_err(|_| InvalidQuantity)?;
    // 20 digits are below 2^67 and the largest suffix is 2^60, so the product fits 128 bits.
    let numerator = mantissa << scale.twos;
    let tens = scale.tens.saturating_add(9 + trailing_zeros as i64 - fraction.len() as i64);
    let power = u32::try_from(tens.unsigned_abs()).ok().and_then(|tens| 10_u128.checked_pow(tens));
    Ok(match power {
        Some(power) if tens >= 0 => numerator.saturating_mul(power),
        Some(power) => numerator.div_ceil(power),
        None if tens >= 0 => u128::MAX,
        None => 1,
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn pod(containers: &[(ContainerRole, &str, &str)]) -> PodFields {
        let container = |(index, (role, resource, value)): (usize, &(ContainerRole, &str, &str))| PodContainer {
            name: format!("c{index}"),
            role: *role,
            resources: ResourceAmounts {
                requests: BTreeMap::new(),
                limits: BTreeMap::from([((*resource).to_owned(), (*value).to_owned())]),
            },
        };
        PodFields {
            annotations: BTreeMap::new(),
            labels: BTreeMap::new(),
            containers: containers.iter().enumerate().map(container).collect(),
            resources: ResourceAmounts::default(),
            priority: 0,
            deadline_secs: None,
        }
    }

    fn requested_amount(containers: &[(ContainerRole, &str, &str)]) -> Result<Option<ResourceAmount>, String> {
        pod_gpus(&pod(containers))
            .map(|requested_amount| requested_amount.map(|requested_amount| requested_amount.amount))
            .map_err(|error| error.to_string())
    }

    #[test]
    fn one_to_sixteen_are_whole_gpus_and_hundred_to_thousand_are_thousandths() {
        for (text, amount) in [
            ("0", ResourceAmount::None),
            ("1", ResourceAmount::Whole(1)),
            ("16", ResourceAmount::Whole(16)),
            ("2000m", ResourceAmount::Whole(2)),
            ("100", ResourceAmount::Thousandths(100)),
            ("1000", ResourceAmount::Thousandths(1000)),
            ("1e3", ResourceAmount::Thousandths(1000)),
        ] {
            assert_eq!(requested_amount(&[(ContainerRole::App, AMD, text)]), Ok(Some(amount)), "{text}");
        }
        for text in ["17", "99", "1001", "-1", "0.5", "500m", "1Gi", "one", ""] {
            let error = requested_amount(&[(ContainerRole::App, NVIDIA, text)]).unwrap_err();
            assert!(error.contains(NVIDIA) && error.contains("100..=1000") && error.contains("c0"), "{text}: {error}");
        }
    }

    #[test]
    fn whole_gpus_add_up_and_init_containers_count_separately() {
        let whole = |containers: &[(ContainerRole, &str, &str)]| requested_amount(containers).unwrap();
        assert_eq!(
            whole(&[(ContainerRole::App, AMD, "2"), (ContainerRole::App, AMD, "3")]),
            Some(ResourceAmount::Whole(5))
        );
        assert_eq!(
            whole(&[(ContainerRole::Init, AMD, "4"), (ContainerRole::App, AMD, "3")]),
            Some(ResourceAmount::Whole(4))
        );
        assert_eq!(
            whole(&[(ContainerRole::Sidecar, AMD, "1"), (ContainerRole::App, AMD, "3")]),
            Some(ResourceAmount::Whole(4))
        );
        assert_eq!(
            whole(&[
                (ContainerRole::Sidecar, AMD, "1"),
                (ContainerRole::Init, AMD, "4"),
                (ContainerRole::App, AMD, "3")
            ]),
            Some(ResourceAmount::Whole(5))
        );
        assert_eq!(
            whole(&[
                (ContainerRole::Init, AMD, "4"),
                (ContainerRole::Sidecar, AMD, "1"),
                (ContainerRole::App, AMD, "2")
            ]),
            Some(ResourceAmount::Whole(4))
        );
        assert!(
            requested_amount(&[(ContainerRole::App, AMD, "9"), (ContainerRole::App, AMD, "8")])
                .unwrap_err()
                .contains("16 whole GPUs")
        );
    }

    #[test]
    fn only_one_container_at_a_time_can_request_a_fraction() {
        let halves =
            requested_amount(&[(ContainerRole::App, AMD, "500"), (ContainerRole::App, AMD, "250")]).unwrap_err();
        assert!(
            halves.contains("container c0 requests 500") && halves.contains("container c1 requests 250"),
            "{halves}"
        );
        assert!(requested_amount(&[(ContainerRole::Sidecar, AMD, "500"), (ContainerRole::Init, AMD, "500")]).is_err());
        assert!(requested_amount(&[(ContainerRole::App, AMD, "500"), (ContainerRole::App, AMD, "1")]).is_err());
        let one = requested_amount(&[
            (ContainerRole::Init, AMD, "250"),
            (ContainerRole::Init, AMD, "700"),
            (ContainerRole::App, AMD, "500"),
        ]);
        assert_eq!(one, Ok(Some(ResourceAmount::Thousandths(700))));
    }

    #[test]
    fn two_vendors_and_unsupported_resources_are_refused_by_name() {
        let two = requested_amount(&[(ContainerRole::App, AMD, "1"), (ContainerRole::App, NVIDIA, "1")]).unwrap_err();
        assert!(two.contains(AMD) && two.contains(NVIDIA) && two.contains("one vendor"), "{two}");
        assert_eq!(
            requested_amount(&[(ContainerRole::App, AMD, "0"), (ContainerRole::App, NVIDIA, "1")]),
            Ok(Some(ResourceAmount::Whole(1)))
        );
        for name in ["nvidia.com/mig-1g.10gb", "nvidia.com/gpu.shared", "amd.com/cpx_nps4", "gpu.intel.com/i915"] {
            assert!(requested_amount(&[(ContainerRole::App, name, "1")]).unwrap_err().contains(name));
        }
        assert_eq!(requested_amount(&[(ContainerRole::App, "nvidia.com/hostdev", "1")]), Ok(None));
    }

    #[test]
    fn host_resources_are_summed_exactly_and_rounded_up_once() {
        let cpus = pod(&[
            (ContainerRole::App, "cpu", "0.1m"),
            (ContainerRole::App, "cpu", "0.1m"),
            (ContainerRole::App, "cpu", "1"),
        ]);
        assert_eq!(host_resources(&cpus), Ok((MilliCpus(1001), Bytes::ZERO)));
        let memory = pod(&[
            (ContainerRole::Init, "memory", "1Gi"),
            (ContainerRole::App, "memory", "0.5"),
            (ContainerRole::App, "memory", "0.5"),
        ]);
        assert_eq!(host_resources(&memory), Ok((MilliCpus::ZERO, Bytes(1 << 30))));
        let error = host_resources(&pod(&[(ContainerRole::App, "memory", "-1")])).unwrap_err().to_string();
        assert!(error.contains("memory") && error.contains("-1"), "{error}");
        assert!(host_resources(&pod(&[(ContainerRole::App, "cpu", "1e10")])).is_err());
        assert!(
            host_resources(&pod(&[(ContainerRole::App, "memory", "8Ei"), (ContainerRole::App, "memory", "1")]))
                .is_err()
        );
    }

    fn nanos(text: &str) -> Option<i128> {
        text.parse::<Quantity>().ok().map(Quantity::nanos)
    }

    #[test]
    fn every_suffix_means_the_same_as_in_kubernetes() {
        for (text, units) in [
            ("2", 2),
            ("+2", 2),
            ("-2", -2),
            ("1.", 1),
            ("1e3", 1_000),
            ("1E3", 1_000),
            ("1E", 1_000_000_000_000_000_000),
            ("1.5e+2", 150),
            ("1500e-2", 15),
            ("2000m", 2),
            ("4k", 4_000),
            ("512M", 512_000_000),
            ("1.5Gi", 1_610_612_736),
            ("16Gi", 17_179_869_184),
            ("128974848", 128_974_848),
            (" 1Ki ", 1_024),
            ("7Ei", 7 << 60),
        ] {
            assert_eq!(nanos(text), Some(units * NANOS_PER_UNIT), "{text}");
        }
        assert_eq!(nanos(".5"), Some(NANOS_PER_UNIT / 2));
        assert_eq!(nanos("500m"), Some(NANOS_PER_UNIT / 2));
    }

    #[test]
    fn values_finer_than_a_billionth_round_up_and_huge_ones_are_capped() {
        assert_eq!(nanos("1e-12"), Some(1));
        assert_eq!(nanos("0.1n"), Some(1));
        assert_eq!(nanos("-0.1n"), Some(-1));
        assert_eq!(nanos("1e-999999999999"), Some(1));
        assert_eq!(nanos("1.0000000001"), Some(NANOS_PER_UNIT + 1));
        assert_eq!(nanos("8Ei"), Some(MAX_NANOS as i128));
        assert_eq!(nanos("1e999999999999"), Some(MAX_NANOS as i128));
        assert_eq!(nanos("0e999999999999"), Some(0));
        assert_eq!(nanos("99999999999999999999Ei"), Some(MAX_NANOS as i128));
    }

    #[test]
    fn nonsense_is_not_a_quantity() {
        for text in [
            "", " ", ".", "Gi", "+", "--1", "1 Gi", "1gi", "1K", "1e", "1e1.5", "1.2.3", "nan", "inf", "0x10", "1Gib",
            "1_000", "½", "٣", "e3",
        ] {
            assert_eq!(nanos(text), None, "{text:?}");
        }
    }

    #[test]
    fn units_and_thousandths_round_up() {
        let quantity: Quantity = "0.0001".parse().unwrap();
        assert_eq!((quantity.units_up(), quantity.thousandths_up()), (1, 1));
        let quantity: Quantity = "1.5".parse().unwrap();
        assert_eq!((quantity.units_up(), quantity.thousandths_up(), quantity.whole()), (2, 1500, None));
    }
}
