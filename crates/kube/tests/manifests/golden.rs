//! Published meaning of annotations and resources together.

use gpupool_core::{Bytes, IsolationLevel, MilliCpus, Millis, Request, RequestedAmount, Share, Vendor};
use gpupool_kube::{KubeError, PodVerdict, check_manifest};

/// Names and values.
type Pairs = &'static [(&'static str, &'static str)];

const NONE: Pairs = &[];

fn manifest(annotations: &[(&str, &str)], resources: &[(&str, &str)]) -> String {
    let mut text = "apiVersion: v1\nkind: Pod\nmetadata:\n  name: p\n".to_owned();
    if !annotations.is_empty() {
        text += "  annotations:\n";
    }
    for (name, value) in annotations {
        text += &format!("    kaiwo.ai/gpu-{name}: {value:?}\n");
    }
    text += "spec:\n  containers:\n  - name: main\n";
    if !resources.is_empty() {
        text += "    resources:\n      limits:\n";
    }
    for (name, value) in resources {
        text += &format!("        {name}: {value}\n");
    }
    text
}

fn verdict_of(text: &str) -> Result<PodVerdict, KubeError> {
    let mut all = check_manifest(text);
    assert_eq!(all.len(), 1, "{text}");
    all.remove(0).verdict
}

fn request(text: &str) -> Request {
    match verdict_of(text) {
        Ok(PodVerdict::Gpu(request)) => *request,
        other => panic!("{other:?}\n{text}"),
    }
}

fn mib(mib: u64) -> Bytes {
    Bytes::from_mib(mib).expect("few enough")
}

#[test]
fn annotations_and_resources_that_agree_are_one_request() {
    const AMD: &str = "amd.com/gpu";
    const NVIDIA: &str = "nvidia.com/gpu";
    let half = RequestedAmount::Share(Share(500));
    #[rustfmt::skip]
    let table: &[(Pairs, Pairs, u16, RequestedAmount, Option<Vendor>)] = &[
        // Annotations alone.
        (&[("fraction", "0.1")], NONE, 1, RequestedAmount::Share(Share(100)), None),
        (&[("fraction", "0.5")], NONE, 1, half, None),
        (&[("fraction", "0.5"), ("sharing", "true")], NONE, 1, half, None),
        (&[("fraction", "0.5"), ("sharing", "false")], NONE, 1, half, None),
        (&[("fraction", "1.0")], NONE, 1, RequestedAmount::Whole, None),
        (&[("memory", "4000")], NONE, 1, RequestedAmount::Memory(mib(4000)), None),
        (&[("memory", "4Gi")], NONE, 1, RequestedAmount::Memory(mib(4096)), None),
        (&[("fraction", "0.5"), ("memory", "4000")], NONE, 1, RequestedAmount::Both(Share(500), mib(4000)), None),
        (&[("fraction", "1.0"), ("memory", "4000")], NONE, 1, RequestedAmount::Both(Share::WHOLE, mib(4000)), None),
        (&[("sharing", "true")], NONE, 1, RequestedAmount::Shared, None),
        (&[("sharing", "TRUE")], NONE, 1, RequestedAmount::Shared, None),
        (&[("memory", "4000"), ("sharing", "true")], NONE, 1, RequestedAmount::Memory(mib(4000)), None),
        // Resources alone.
        (NONE, &[(NVIDIA, "1")], 1, RequestedAmount::Whole, Some(Vendor::Nvidia)),
        (NONE, &[(NVIDIA, "\"1\"")], 1, RequestedAmount::Whole, Some(Vendor::Nvidia)),
        (NONE, &[(AMD, "16")], 16, RequestedAmount::Whole, Some(Vendor::Amd)),
        (NONE, &[(AMD, "100")], 1, RequestedAmount::Share(Share(100)), Some(Vendor::Amd)),
        (NONE, &[(AMD, "500")], 1, half, Some(Vendor::Amd)),
        (NONE, &[(AMD, "999")], 1, RequestedAmount::Share(Share(999)), Some(Vendor::Amd)),
        (NONE, &[(AMD, "1000")], 1, RequestedAmount::Whole, Some(Vendor::Amd)),
        (NONE, &[(AMD, "0"), (NVIDIA, "2")], 2, RequestedAmount::Whole, Some(Vendor::Nvidia)),
        // Both.
        (&[("fraction", "0.5")], &[(AMD, "500")], 1, half, Some(Vendor::Amd)),
        (&[("fraction", "0.50")], &[(AMD, "\"500\"")], 1, half, Some(Vendor::Amd)),
        (&[("fraction", "1.0")], &[(NVIDIA, "1")], 1, RequestedAmount::Whole, Some(Vendor::Nvidia)),
        (&[("fraction", "1")], &[(NVIDIA, "1000")], 1, RequestedAmount::Whole, Some(Vendor::Nvidia)),
        (&[("memory", "4000")], &[(AMD, "500")], 1, RequestedAmount::Both(Share(500), mib(4000)), Some(Vendor::Amd)),
        (&[("fraction", "0.5"), ("memory", "4000")], &[(AMD, "500")], 1, RequestedAmount::Both(Share(500), mib(4000)), Some(Vendor::Amd)),
        (&[("memory", "4000")], &[(NVIDIA, "1")], 1, RequestedAmount::Both(Share::WHOLE, mib(4000)), Some(Vendor::Nvidia)),
        (&[("memory", "4000")], &[(NVIDIA, "1000")], 1, RequestedAmount::Both(Share::WHOLE, mib(4000)), Some(Vendor::Nvidia)),
        (&[("memory", "4000")], &[(NVIDIA, "4")], 4, RequestedAmount::Both(Share::WHOLE, mib(4000)), Some(Vendor::Nvidia)),
        (&[("sharing", "true")], &[(AMD, "250")], 1, RequestedAmount::Share(Share(250)), Some(Vendor::Amd)),
        (&[("sharing", "false")], &[(NVIDIA, "1")], 1, RequestedAmount::Whole, Some(Vendor::Nvidia)),
        (&[("sharing", "yes")], &[(NVIDIA, "1")], 1, RequestedAmount::Whole, Some(Vendor::Nvidia)),
        (&[("fraction", "0.3333")], &[(AMD, "333")], 1, RequestedAmount::Share(Share(333)), Some(Vendor::Amd)),
        (&[("fraction", "0.9996")], NONE, 1, RequestedAmount::Whole, None),
    ];
    for (annotations, resources, gpus, amount, vendor) in table {
        let request = request(&manifest(annotations, resources));
        let got = (request.gpus, request.amount, request.select.vendor);
        assert_eq!(got, (*gpus, *amount, *vendor), "{annotations:?} {resources:?}");
        assert_eq!(request.validate(), Ok(()), "{annotations:?} {resources:?}");
    }
}

#[test]
fn contradictions_and_invalid_values_are_refused() {
    #[rustfmt::skip]
    let table: &[(Pairs, Pairs, &str, &[&str])] = &[
        // Contradictions name both sides.
        (&[("fraction", "0.5")], &[("nvidia.com/gpu", "1")], "contradiction", &["gpu-fraction", "0.5", "nvidia.com/gpu", "\"1\"", "500"]),
        (&[("fraction", "0.5")], &[("amd.com/gpu", "250")], "contradiction", &["gpu-fraction", "amd.com/gpu", "250"]),
        (&[("fraction", "0.5")], &[("amd.com/gpu", "1000")], "contradiction", &["gpu-fraction", "amd.com/gpu", "1000"]),
        (&[("fraction", "1.0")], &[("amd.com/gpu", "2")], "contradiction", &["gpu-fraction", "amd.com/gpu", "2"]),
        (&[("fraction", "1.0")], &[("amd.com/gpu", "500")], "contradiction", &["gpu-fraction", "amd.com/gpu", "500"]),
        (&[("fraction", "0.5")], &[("amd.com/gpu", "0")], "contradiction", &["gpu-fraction", "amd.com/gpu", "\"0\""]),
        (&[("memory", "4000")], &[("amd.com/gpu", "0")], "contradiction", &["gpu-memory", "amd.com/gpu"]),
        (&[("sharing", "true")], &[("amd.com/gpu", "0")], "contradiction", &["gpu-sharing", "amd.com/gpu"]),
        (&[("sharing", "true")], &[("nvidia.com/gpu", "1")], "contradiction", &["gpu-sharing", "nvidia.com/gpu", "gpu-fraction or", "gpu-memory"]),
        (&[("sharing", "true"), ("memory", "4000")], &[("nvidia.com/gpu", "1")], "contradiction", &["gpu-sharing", "nvidia.com/gpu"]),
        (&[("sharing", "True")], &[("nvidia.com/gpu", "1000")], "contradiction", &["gpu-sharing", "nvidia.com/gpu"]),
        (&[("isolation", "mps")], &[("amd.com/gpu", "500")], "contradiction", &["gpu-isolation", "amd.com/gpu", "time-slicing"]),
        (&[("isolation", "mig")], &[("amd.com/gpu", "1")], "contradiction", &["gpu-isolation", "amd.com/gpu", "time-slicing"]),
        // Values.
        (&[("fraction", "0.05")], NONE, "invalid_annotation", &["gpu-fraction", "0.05", "0.1 to 1.0"]),
        (&[("fraction", "1.5")], NONE, "invalid_annotation", &["gpu-fraction", "1.5"]),
        (&[("fraction", "NaN")], NONE, "invalid_annotation", &["gpu-fraction", "NaN"]),
        (&[("fraction", "0.0999")], NONE, "invalid_annotation", &["gpu-fraction", "0.0999", "0.1 to 1.0"]),
        (&[("fraction", "1.0001")], NONE, "invalid_annotation", &["gpu-fraction", "1.0001"]),
        (&[("fraction", "")], NONE, "invalid_annotation", &["gpu-fraction"]),
        (&[("memory", "0")], NONE, "invalid_annotation", &["gpu-memory", "above 0"]),
        (&[("memory", "4GB")], NONE, "invalid_annotation", &["gpu-memory", "4GB", "MiB"]),
        (&[("isolation", "jail")], NONE, "invalid_annotation", &["gpu-isolation", "jail", "mps or mig"]),
        (&[("isolation", "mps")], NONE, "invalid_annotation", &["gpu-isolation", "requests a GPU"]),
        (&[("fractoin", "0.5")], NONE, "unknown_annotation", &["gpu-fractoin", "did you mean kaiwo.ai/gpu-fraction?"]),
        (&[("colour-of-fans", "red")], NONE, "unknown_annotation", &["gpu-colour", "one of kaiwo.ai/gpu-fraction"]),
        (NONE, &[("amd.com/gpu", "17")], "invalid_resource", &["amd.com/gpu", "17", "main", "1..=16", "100..=1000"]),
        (NONE, &[("amd.com/gpu", "99")], "invalid_resource", &["amd.com/gpu", "99"]),
        (NONE, &[("amd.com/gpu", "1001")], "invalid_resource", &["amd.com/gpu", "1001"]),
        (NONE, &[("amd.com/gpu", "-1")], "invalid_resource", &["amd.com/gpu", "-1"]),
        (NONE, &[("amd.com/gpu", "0.5")], "invalid_resource", &["amd.com/gpu", "0.5"]),
        (NONE, &[("amd.com/gpu", "500m")], "invalid_resource", &["amd.com/gpu", "500m"]),
        (NONE, &[("amd.com/gpu", "[1]")], "invalid_field", &["spec.containers[0].resources.limits.amd.com/gpu", "a list"]),
        (NONE, &[("amd.com/gpu", "1"), ("nvidia.com/gpu", "1")], "invalid_resources", &["amd.com/gpu", "nvidia.com/gpu", "one vendor"]),
        (NONE, &[("nvidia.com/mig-1g.10gb", "1")], "invalid_resource", &["nvidia.com/mig-1g.10gb", "nvidia.com/gpu"]),
        (NONE, &[("amd.com/gpu", "1"), ("cpu", "lots")], "invalid_resource", &["cpu", "lots"]),
    ];
    for (annotations, resources, code, words) in table {
        let error = match verdict_of(&manifest(annotations, resources)) {
            Err(error) => error,
            other => panic!("{annotations:?} {resources:?}: {other:?}"),
        };
        assert_eq!(error.code(), *code, "{annotations:?} {resources:?}: {error}");
        for word in *words {
            assert!(error.to_string().contains(word), "{annotations:?} {resources:?}: no {word} in: {error}");
        }
        for part in [error.field(), error.allowed()] {
            assert!(!part.is_empty(), "{error}");
        }
    }
}

#[test]
fn a_pod_without_gpu_resources_requests_none() {
    for (annotations, resources) in [
        (NONE, NONE),
        (NONE, &[("amd.com/gpu", "0")] as &[_]),
        (NONE, &[("amd.com/gpu", "")]),
        (NONE, &[("cpu", "2"), ("memory", "1Gi")]),
        (&[("sharing", "false")], NONE),
        (&[("isolation", "none")], NONE),
    ] {
        assert_eq!(
            verdict_of(&manifest(annotations, resources)),
            Ok(PodVerdict::NoGpu),
            "{annotations:?} {resources:?}"
        );
    }
}

#[test]
fn isolation_is_kept_if_the_vendor_supports_it() {
    for (name, isolation) in [
        ("none", IsolationLevel::None),
        ("time-slicing", IsolationLevel::TimeSlicing),
        ("mps", IsolationLevel::Mps),
        (" mig ", IsolationLevel::Mig),
    ] {
        let annotations = [("isolation", name), ("fraction", "0.5")];
        assert_eq!(request(&manifest(&annotations, &[("nvidia.com/gpu", "500")])).isolation, isolation);
        assert_eq!(request(&manifest(&annotations, NONE)).isolation, isolation);
    }
}

#[test]
fn requests_and_limits_of_a_container_must_agree() {
    let text = |request: &str, limit: &str| {
        format!(
            "kind: Pod\nspec:\n  containers:\n  - name: main\n    resources:\n      requests: {{amd.com/gpu: {request}}}\n      \
             limits: {{amd.com/gpu: {limit}}}\n"
        )
    };
    assert_eq!(request(&text("2", "\"2\"")).gpus, 2);
    let error = verdict_of(&text("1", "2")).unwrap_err().to_string();
    assert!(error.contains("1 in requests, 2 in limits"), "{error}");
}

#[test]
fn other_fields_of_the_pod_become_fields_of_the_request() {
    let request = request(
        r#"
apiVersion: batch/v1
kind: Job
metadata: {name: train, namespace: research}
spec:
  activeDeadlineSeconds: 7200
  template:
    metadata:
      labels: {team: vision, "count": "3"}
    spec:
      priority: 2000000000
      activeDeadlineSeconds: 3600
      initContainers:
      - {name: fetch, resources: {requests: {cpu: 4, memory: 1Gi}}}
      - {name: proxy, restartPolicy: Always, resources: {requests: {cpu: 250m, memory: 100Mi}}}
      containers:
      - {name: a, resources: {requests: {cpu: 0.5, memory: 512M}, limits: {cpu: 8, nvidia.com/gpu: 2}}}
      - {name: b, resources: {limits: {cpu: 1000m, memory: "1e9"}}}
"#,
    );
    assert_eq!(request.cpus, MilliCpus(4000));
    assert_eq!(request.host_memory, Bytes(100 * 1024 * 1024 + 512_000_000 + 1_000_000_000));
    assert_eq!((&*request.owner, request.worker_id.as_deref()), ("research", Some("train")));
    assert_eq!((request.labels["team"].as_ref(), request.labels["count"].as_ref()), ("vision", "3"));
    assert_eq!(request.priority, 1_000_000);
    assert_eq!(request.max_duration, Some(Millis::from_secs(3600)));
    assert_eq!((request.gpus, request.amount), (2, RequestedAmount::Whole));
}

#[test]
fn every_kind_of_workload_is_supported_and_lists_are_expanded() {
    let template = "{metadata: {annotations: {kaiwo.ai/gpu-fraction: '0.5'}}, spec: {containers: [{name: a}]}}";
    let mut text = String::new();
    for (version, kind) in [
        ("apps/v1", "Deployment"),
        ("apps/v1", "StatefulSet"),
        ("apps/v1", "DaemonSet"),
        ("apps/v1", "ReplicaSet"),
        ("batch/v1", "Job"),
    ] {
        text += &format!("---\napiVersion: {version}\nkind: {kind}\nspec: {{template: {template}}}\n");
    }
    text += &format!("---\nkind: CronJob\nspec: {{jobTemplate: {{spec: {{template: {template}}}}}}}\n");
    text += "---\nkind: List\nitems:\n- {kind: Pod, spec: {containers: [{name: a}]}}\n- {kind: RayCluster}\n";
    let all = check_manifest(&text);
    assert_eq!(all.iter().map(|checked| checked.document).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6, 7, 7]);
    for checked in &all[..6] {
        assert!(matches!(&checked.verdict, Ok(PodVerdict::Gpu(_))), "{checked:?}");
    }
    assert_eq!(all[6].verdict, Ok(PodVerdict::NoGpu));
    assert_eq!(all[7].verdict, Err(KubeError::Kind { kind: "RayCluster".to_owned() }));
}

#[test]
fn an_annotation_on_the_workload_is_refused_with_the_right_place() {
    let text = "kind: Deployment\nmetadata: {annotations: {kaiwo.ai/gpu-fraction: '0.5'}}\n\
                spec: {template: {spec: {containers: [{name: a}]}}}\n";
    let error = verdict_of(text).unwrap_err();
    assert_eq!(error.code(), "misplaced_annotation");
    assert!(error.to_string().contains("spec.template.metadata.annotations"), "{error}");
}

#[test]
fn numbers_and_booleans_must_be_quoted_in_annotations_and_labels() {
    for (metadata, word) in [
        ("annotations: {kaiwo.ai/gpu-fraction: 0.5}", "kaiwo.ai/gpu-fraction: \"0.5\""),
        ("annotations: {kaiwo.ai/gpu-sharing: true}", "kaiwo.ai/gpu-sharing: \"true\""),
        ("annotations: {example.com/revision: 3}", "example.com/revision: \"3\""),
        ("labels: {version: 1.5}", "label version"),
    ] {
        let text = format!("kind: Pod\nmetadata: {{{metadata}}}\nspec: {{containers: [{{name: a}}]}}\n");
        let error = verdict_of(&text).unwrap_err();
        assert_eq!(error.code(), "not_a_string", "{metadata}");
        assert!(error.to_string().contains(word), "{error}");
    }
}

#[test]
fn resources_of_the_pod_replace_the_sum_of_its_containers() {
    let text = |resources: &str| {
        format!(
            "kind: Pod\nspec:\n  resources: {resources}\n  containers:\n  - name: a\n    resources: {{limits: {{cpu: 1, \
             amd.com/gpu: 1}}}}\n"
        )
    };
    assert_eq!(request(&text("{requests: {cpu: 3}}")).cpus, MilliCpus(3000));
    assert_eq!(request(&text("{limits: {cpu: 3, memory: 1Ki}}")).cpus, MilliCpus(1000));
    assert_eq!(request(&text("{limits: {memory: 1Ki}}")).host_memory, Bytes(1024));
    assert!(verdict_of(&text("{limits: {amd.com/gpu: 1}}")).unwrap_err().to_string().contains("spec.resources"));
}

#[test]
fn kinds_without_pods_request_no_gpu() {
    for text in ["kind: Service", "apiVersion: v1\nkind: ConfigMap", "apiVersion: networking.k8s.io/v1\nkind: Ingress"]
    {
        assert_eq!(check_manifest(text)[0].verdict, Ok(PodVerdict::NoGpu), "{text}");
    }
    for text in ["apiVersion: serving.knative.dev/v1\nkind: Service", "apiVersion: ray.io/v1\nkind: RayJob"] {
        assert!(matches!(check_manifest(text)[0].verdict, Err(KubeError::Kind { .. })), "{text}");
    }
}
