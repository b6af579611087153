//! Pod manifests: any text gives verdicts, and every resulting request is valid for the pool.

#![no_main]

use gpupool_kube::{PodVerdict, check_manifest};

libfuzzer_sys::fuzz_target!(|text: &str| {
    for checked in check_manifest(text) {
        match checked.verdict {
            Ok(PodVerdict::Gpu(request)) => assert_eq!(request.validate(), Ok(())),
            Ok(PodVerdict::NoGpu) => {}
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
});
