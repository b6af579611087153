//! Pod manifests: any text is judged, and what is asked for is a request the pool would take.

#![no_main]

use gpupool_kube::{Verdict, check};

libfuzzer_sys::fuzz_target!(|text: &str| {
    for checked in check(text) {
        match checked.verdict {
            Ok(Verdict::Gpu(request)) => assert_eq!(request.validate(), Ok(())),
            Ok(Verdict::NoGpu) => {}
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
});
