//! What the containers of a pod ask for together: GPUs, host CPUs and host memory.
//!
//! Containers count as in Kubernetes: the pod needs the sum of those that run side by side, or what an init container
//! needs beside the sidecars started before it, whichever is more.

use std::collections::BTreeSet;
use std::ops::Add;
use std::str::FromStr;

use gpupool_core::{Bytes, MilliCpus, Vendor};

use crate::error::{KubeError, shown};
use crate::limits::{CPUS, MIN_THOUSANDTHS, QUANTITY_DIGITS, SHOWN_CONTAINERS, WHOLE_GPUS};
use crate::pod::{Container, Pod, Resources, Role};

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

// Kubernetes quantities (`500m`, `16Gi`, `1e9`), read exactly.
//
// As in Kubernetes a quantity is a multiple of 10⁻⁹, anything finer rounded away from zero, and never beyond ±(2⁶³−1).
// Stricter than Kubernetes in two things nobody writes: there must be a digit (`Gi` alone is not zero), and no more
// than 20 of them may count.

const NANOS: i128 = 1_000_000_000;
const CAP: u128 = i64::MAX as u128 * NANOS as u128;

/// An amount of something, exact to a billionth.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Quantity {
    nanos: i128,
}

/// The text is not a quantity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a quantity such as 2, 0.5, 500m, 16Gi or 1e9")]
pub struct InvalidQuantity;

impl Quantity {
    /// Nothing.
    pub const ZERO: Self = Self { nanos: 0 };

    /// In billionths, exactly.
    pub const fn nanos(self) -> i128 {
        self.nanos
    }

    /// Whether it is below zero.
    pub const fn is_negative(self) -> bool {
        self.nanos < 0
    }

    /// The whole number it is, if it is one.
    pub const fn whole(self) -> Option<i128> {
        if self.nanos % NANOS == 0 { Some(self.nanos / NANOS) } else { None }
    }

    /// Units, rounded up; nothing where it is negative.
    pub fn units_up(self) -> u128 {
        self.nanos.max(0).unsigned_abs().div_ceil(NANOS.unsigned_abs())
    }

    /// Thousandths, rounded up; nothing where it is negative.
    pub fn thousandths_up(self) -> u128 {
        self.nanos.max(0).unsigned_abs().div_ceil(NANOS.unsigned_abs() / 1000)
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
        let scale = Scale::from_suffix(suffix).ok_or(InvalidQuantity)?;
        let nanos = nanos(whole, fraction, scale)?.min(CAP) as i128;
        Ok(Self { nanos: if negative { -nanos } else { nanos } })
    }
}

/// What a suffix multiplies by: 2^twos × 10^tens.
#[derive(Clone, Copy)]
struct Scale {
    twos: u32,
    tens: i64,
}

impl Scale {
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

/// |value| in billionths, rounded up; anything at all where it is above [`CAP`], as long as it is above.
fn nanos(whole: &str, fraction: &str, scale: Scale) -> Result<u128, InvalidQuantity> {
    let all = format!("{whole}{fraction}");
    let counted = all.trim_start_matches('0').trim_end_matches('0');
    if counted.is_empty() {
        return Ok(0);
    }
    if counted.len() > QUANTITY_DIGITS {
        return Err(InvalidQuantity);
    }
    let trailing_zeros = all.len() - all.trim_end_matches('0').len();
    let mantissa: u128 = counted.parse().map_err(|_| InvalidQuantity)?;
    // 20 digits are below 2^67 and the largest suffix is 2^60: this fits 128 bits.
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

    fn nanos(text: &str) -> Option<i128> {
        text.parse::<Quantity>().ok().map(Quantity::nanos)
    }

    #[test]
    fn every_suffix_means_what_kubernetes_means_by_it() {
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
            assert_eq!(nanos(text), Some(units * NANOS), "{text}");
        }
        assert_eq!(nanos(".5"), Some(NANOS / 2));
        assert_eq!(nanos("500m"), Some(NANOS / 2));
    }

    #[test]
    fn what_is_finer_than_a_billionth_rounds_up_and_what_is_huge_is_capped() {
        assert_eq!(nanos("1e-12"), Some(1));
        assert_eq!(nanos("0.1n"), Some(1));
        assert_eq!(nanos("-0.1n"), Some(-1));
        assert_eq!(nanos("1e-999999999999"), Some(1));
        assert_eq!(nanos("1.0000000001"), Some(NANOS + 1));
        assert_eq!(nanos("8Ei"), Some(CAP as i128));
        assert_eq!(nanos("1e999999999999"), Some(CAP as i128));
        assert_eq!(nanos("0e999999999999"), Some(0));
        assert_eq!(nanos("99999999999999999999Ei"), Some(CAP as i128));
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
