//! Any text results in a request that the pool accepts, or in an error that names the problem.

use gpupool_kube::{PodVerdict, Quantity, check_manifest};
use proptest::prelude::*;

const MANIFEST: &str = r#"apiVersion: v1
kind: Pod
metadata:
  name: train
  namespace: research
  labels: &labels {team: vision}
  annotations:
    kaiwo.ai/gpu-fraction: "0.5"
    kaiwo.ai/gpu-memory: "4000"
    kaiwo.ai/gpu-sharing: "true"
    kaiwo.ai/gpu-isolation: time-slicing
spec:
  nodeSelector: *labels
  priority: 5
  activeDeadlineSeconds: 3600
  initContainers:
  - name: fetch
    restartPolicy: Always
    resources: {requests: {cpu: 100m, memory: 1Gi}}
  containers:
  - name: main
    resources:
      requests: {amd.com/gpu: 500, cpu: 2, memory: 16Gi}
      limits: {amd.com/gpu: "500", cpu: 4e0}
---
{"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"}, "spec": {"template":
  {"metadata": {"labels": {"team": "web"}}, "spec": {"containers": [{"name": "a", "resources": {"limits": {"nvidia.com/gpu": 1}}}]}}}}
---
kind: List
items:
- kind: Job
  spec: {template: {spec: {containers: [{name: a}]}}}
"#;

/// Checks that every verdict is usable.
fn check_result(text: &str) -> Result<(), TestCaseError> {
    for checked in check_manifest(text) {
        match checked.verdict {
            Ok(PodVerdict::Gpu(request)) => {
                prop_assert!(request.gpus >= 1);
                prop_assert_eq!(request.validate(), Ok(()));
            }
            Ok(PodVerdict::NoGpu) => {}
            Err(error) => {
                for part in [error.to_string(), error.field(), error.allowed(), error.code().to_owned()] {
                    prop_assert!(!part.is_empty(), "{error:?}");
                }
                prop_assert!(error.to_string().len() < 16_384, "{error:?}");
            }
        }
    }
    Ok(())
}

fn quoted(text: &str) -> String {
    let escaped: String = text.chars().map(|c| format!("\\U{:08x}", u32::from(c))).collect();
    format!("\"{escaped}\"")
}

fn boundary(text: &str, mut at: usize) -> usize {
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at
}

/// Number as text, its digits without the point, and the count of decimals.
fn number() -> impl Strategy<Value = (String, u128, u32)> {
    (0_u32..100_000, proptest::option::of("[0-9]{0,5}")).prop_map(|(whole, decimals)| match decimals {
        None => (whole.to_string(), u128::from(whole), 0),
        Some(decimals) => {
            let digits = format!("{whole}{decimals}").parse().unwrap_or(0);
            (format!("{whole}.{decimals}"), digits, decimals.len() as u32)
        }
    })
}

/// Suffix and its multiplier, as a fraction.
fn suffix() -> impl Strategy<Value = (String, u128, u128)> {
    let table: Vec<(&str, u128, u128)> = vec![
        ("", 1, 1),
        ("n", 1, 1_000_000_000),
        ("u", 1, 1_000_000),
        ("m", 1, 1_000),
        ("k", 1_000, 1),
        ("M", 1_000_000, 1),
        ("G", 1_000_000_000, 1),
        ("T", 1_000_000_000_000, 1),
        ("P", 1_000_000_000_000_000, 1),
        ("E", 1_000_000_000_000_000_000, 1),
        ("Ki", 1 << 10, 1),
        ("Mi", 1 << 20, 1),
        ("Gi", 1 << 30, 1),
        ("Ti", 1 << 40, 1),
        ("Pi", 1 << 50, 1),
        ("Ei", 1 << 60, 1),
    ];
    let named = proptest::sample::select(table).prop_map(|(name, up, down)| (name.to_owned(), up, down));
    let exponent = (-12_i32..=12, proptest::bool::ANY).prop_map(|(exponent, capital)| {
        let power = 10_u128.pow(exponent.unsigned_abs());
        let text = format!("{}{exponent}", if capital { 'E' } else { 'e' });
        if exponent < 0 { (text, 1, power) } else { (text, power, 1) }
    });
    prop_oneof![named, exponent]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_text_never_panics(text in "\\PC{0,200}") {
        check_result(&text)?;
    }

    #[test]
    fn arbitrary_yaml_punctuation_never_panics(text in "[-{}\\[\\]:,&*!|>'\"#%@?~<\\n\\t a0.e]{0,120}") {
        check_result(&text)?;
        check_result(&format!("kind: Pod\nmetadata: {text}"))?;
        check_result(&format!("kind: Pod\nspec: {{containers: [{text}]}}"))?;
    }

    #[test]
    fn a_truncated_manifest_never_panics(at in 0..MANIFEST.len()) {
        check_result(&MANIFEST[..boundary(MANIFEST, at)])?;
    }

    #[test]
    fn a_mutated_manifest_never_panics(
        cuts in proptest::collection::vec((0..MANIFEST.len(), 0_usize..12, "[-{}\\[\\]:,&*'\"\\n a-z0-9.]{0,8}"), 1..6)
    ) {
        let mut text = MANIFEST.to_owned();
        for (at, length, new) in cuts {
            let from = boundary(&text, at.min(text.len()));
            let to = boundary(&text, (at + length).min(text.len())).max(from);
            text.replace_range(from..to, &new);
        }
        check_result(&text)?;
    }

    #[test]
    fn arbitrary_annotations_and_resources_never_panic(
        name in prop_oneof![
            proptest::sample::select(vec!["fraction", "memory", "sharing", "isolation"]).prop_map(str::to_owned),
            "\\PC{0,12}",
        ],
        value in prop_oneof!["\\PC{0,20}", "[-+]?[0-9.]{0,30}(e[0-9]{0,20})?[KMGTPE]?i?"],
        gpus in prop_oneof!["\\PC{0,10}", "[-+]?[0-9.]{0,30}(e[0-9]{0,20})?[munkKMGTPE]?i?"],
        cpu in prop_oneof!["\\PC{0,10}", "[-+]?[0-9.]{0,30}(e[0-9]{0,20})?[munkKMGTPE]?i?"],
    ) {
        check_result(&format!(
            "kind: Pod\nmetadata:\n  annotations:\n    {}: {}\nspec:\n  containers:\n  - resources:\n      limits:\n        \
             nvidia.com/gpu: {}\n        cpu: {}\n        memory: {}\n",
            quoted(&format!("kaiwo.ai/gpu-{name}")), quoted(&value), quoted(&gpus), quoted(&cpu), quoted(&cpu),
        ))?;
    }

    #[test]
    fn bare_scalars_never_panic(scalar in "[-+.0-9eExXoinfNaN_:~]{0,24}") {
        check_result(&MANIFEST.replace("\"500\"", &scalar))?;
        check_result(&MANIFEST.replace("\"0.5\"", &scalar))?;
        check_result(&MANIFEST.replace("16Gi", &scalar))?;
        check_result(&MANIFEST.replace("priority: 5", &format!("priority: {scalar}")))?;
    }

    #[test]
    fn a_fraction_is_accepted_exactly_from_a_tenth_to_one(thousandths in 0_u32..1_500) {
        let text = format!("{}.{:03}", thousandths / 1000, thousandths % 1000);
        let manifest = format!(
            "kind: Pod\nmetadata: {{annotations: {{kaiwo.ai/gpu-fraction: '{text}'}}}}\nspec: {{containers: [{{}}]}}\n"
        );
        let accepted = check_manifest(&manifest)[0].verdict.is_ok();
        prop_assert_eq!(accepted, (100..=1000).contains(&thousandths), "{}", text);
    }

    #[test]
    fn a_quantity_is_the_ratio_it_says(
        sign in proptest::sample::select(vec!["", "+", "-"]), (text, digits, decimals) in number(),
        (suffix, up, down) in suffix(),
    ) {
        const NANOS: u128 = 1_000_000_000;
        let size = (digits * up * NANOS).div_ceil(10_u128.pow(decimals) * down).min(i64::MAX as u128 * NANOS) as i128;
        let written = format!("{sign}{text}{suffix}");
        let quantity: Quantity = written.parse().map_err(|_| TestCaseError::fail(written.clone()))?;
        prop_assert_eq!(quantity.nanos(), if sign == "-" { -size } else { size }, "{}", written);
    }

    #[test]
    fn arbitrary_quantities_never_panic(text in "[-+]?[0-9.]{0,40}[a-zA-Z]{0,2}[-+]?[0-9]{0,20}") {
        if let Ok(quantity) = text.parse::<Quantity>() {
            prop_assert!(quantity.units_up() <= quantity.thousandths_up());
        }
    }
}

#[test]
fn the_mutated_manifest_is_valid() {
    let all = check_manifest(MANIFEST);
    assert_eq!(all.len(), 3);
    for checked in all {
        assert!(checked.verdict.is_ok(), "{checked:?}");
    }
}
