//! The links between GPUs in amd-smi's trees, in the shapes it gave them over time.

use std::collections::BTreeMap;

use serde_json::Value;

use super::amd_smi_tree::{Tree, number};
use super::links::{Links, Way};
use super::quantity;

/// All links the trees tell of. `places` are those of the GPUs' numbers.
pub(crate) fn links(gpus: &BTreeMap<u32, Value>, places: &BTreeMap<u32, usize>) -> Links {
    let by_bdf: BTreeMap<String, u32> = gpus.iter().filter_map(|(&gpu, tree)| Some((bdf(tree)?, gpu))).collect();
    let mut links = Links::default();
    for (gpu, tree) in gpus {
        let mut join = |other: Option<u32>, kind: Option<String>, hops: Option<u64>, weight: Option<u64>| {
            let link = Way { kind: kind.as_deref(), hops, weight }.link();
            if let (Some(&a), Some(&b), Some(link)) = (places.get(gpu), other.and_then(|gpu| places.get(&gpu)), link) {
                links.join(a, b, link);
            }
        };
        for (name, kind) in tree.get("link_type").and_then(Value::as_object).into_iter().flatten() {
            let count = |table: &str| tree.get(table)?.get(name).and_then(count);
            let other = name.rsplit('_').next().and_then(|digits| digits.parse().ok());
            join(other, quantity::text_of(kind), count("hops"), count("weight"));
        }
        let peer = |link: &Value| {
            let by_number = link.get("gpu").and_then(number);
            by_number.or_else(|| by_bdf.get(&bdf(link)?).copied())
        };
        for link in tree.get("links").and_then(Value::as_array).into_iter().flatten() {
            let count = |names: &[&str]| names.iter().find_map(|name| link.get(name).and_then(count));
            join(peer(link), Tree(link).first(&["link_type"]), count(&["num_hops", "hops"]), count(&["weight"]));
        }
        let metrics = tree.get("link_metrics");
        for link in metrics.and_then(|metrics| metrics.get("links")).and_then(Value::as_array).into_iter().flatten() {
            let has_traffic = Tree(link).first(&["read", "write"]).is_some();
            let kind = Tree(link).first(&["link_type"]).or_else(|| Tree(metrics?).first(&["link_type"]));
            join(peer(link), kind.filter(|_| has_traffic), None, None);
        }
    }
    links
}

fn count(value: &Value) -> Option<u64> {
    quantity::count(&quantity::text_of(value)?)
}

fn bdf(tree: &Value) -> Option<String> {
    Tree(tree).first(&["bdf", "bus.bdf"]).map(|bdf| bdf.to_ascii_lowercase())
}
