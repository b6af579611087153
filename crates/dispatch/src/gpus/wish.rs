//! Which GPUs a run wishes for.

use std::collections::BTreeSet;

use gpupool_api::{RequestBody, SelectBody};
use gpupool_core::ids::GpuId;

use super::GpuError;
use super::limits::GPUS;

/// The GPUs a run wishes for. Each is asked for on its own, and has a place of its own, counted from 0.
///
/// Parts of GPUs are placed by the strategy of the body, each on its own: with `best-fit`, the agent's choice for parts, two
/// halves come from one GPU where they fit; `worst-fit` spreads them.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GpuWish {
    /// What is asked for at each place.
    pub body: RequestBody,
    /// How many of them. Where `gpu_ids` names some, it must be 0 or as many as these.
    pub leases: usize,
    /// Exactly these GPUs, one place each; any, where it is empty.
    pub gpu_ids: Vec<u32>,
}

impl GpuWish {
    /// What is asked for, place by place.
    pub(super) fn bodies(self) -> Result<Vec<RequestBody>, GpuError> {
        let wrong = |field, value: String, allowed: &str| GpuError::Wish { field, value, allowed: allowed.into() };
        let (named, count) = (self.gpu_ids.len(), self.leases);
        if named.max(count) > GPUS {
            return Err(wrong("the number of GPUs", named.max(count).to_string(), &format!("at most {GPUS}")));
        }
        if named == 0 {
            if count == 0 {
                return Err(wrong("the number of GPUs", "0".into(), "1 or more"));
            }
            return Ok(vec![self.body; count]);
        }
        if count != 0 && count != named {
            return Err(wrong("the number of GPUs", count.to_string(), &format!("{named}, as many as are named")));
        }
        let mut seen = BTreeSet::new();
        if let Some(twice) = self.gpu_ids.iter().find(|id| !seen.insert(**id)) {
            return Err(wrong("gpu_ids", format!("{:?}", self.gpu_ids), &format!("each once, and {twice} is twice")));
        }
        if !self.body.select.gpu_ids.is_empty() {
            return Err(wrong(
                "select.gpu_ids",
                format!("{:?}", self.body.select.gpu_ids),
                "empty where GPUs are named",
            ));
        }
        let on = |id: &u32| {
            let select = SelectBody { gpu_ids: vec![GpuId(*id)], ..self.body.select.clone() };
            RequestBody { select, ..self.body.clone() }
        };
        Ok(self.gpu_ids.iter().map(on).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wish(leases: usize, gpu_ids: &[u32]) -> Result<Vec<RequestBody>, String> {
        let body = RequestBody { fraction: Some(0.5), ..RequestBody::default() };
        GpuWish { body, leases, gpu_ids: gpu_ids.to_vec() }.bodies().map_err(|error| error.to_string())
    }

    #[test]
    fn each_gpu_is_asked_for_on_its_own() {
        let any = wish(3, &[]).unwrap();
        assert!(any.len() == 3 && any.iter().all(|body| body.select.gpu_ids.is_empty()), "{any:#?}");
        for count in [0, 2] {
            let named = wish(count, &[2, 0]).unwrap();
            let ids: Vec<_> = named.iter().map(|body| body.select.gpu_ids.clone()).collect();
            assert_eq!(ids, [vec![GpuId(2)], vec![GpuId(0)]]);
            assert!(named.iter().all(|body| body.fraction == Some(0.5)), "{named:#?}");
        }
    }

    #[test]
    fn a_wish_that_cannot_be_is_refused_with_what_is_allowed() {
        let cases: [(usize, &[u32], &str); 4] = [
            (0, &[], "the number of GPUs is 0, and must be 1 or more"),
            (3, &[0, 1], "the number of GPUs is 3, and must be 2, as many as are named"),
            (0, &[1, 2, 1], "gpu_ids is [1, 2, 1], and must be each once, and 1 is twice"),
            (5_000, &[], "the number of GPUs is 5000, and must be at most 1024"),
        ];
        for (leases, gpu_ids, says) in cases {
            assert_eq!(wish(leases, gpu_ids).unwrap_err(), says);
        }
    }
}
