//! Whole numbers as other servers write them: some send `40.0`, or a fraction, where ours send `40`.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Error, Unexpected, Visitor};
use serde::{Deserialize, Deserializer};

/// Beyond this a `f64` does not tell whole numbers apart.
const MOST: f64 = 9_007_199_254_740_992.0;

/// A number from 0 on; what it has beyond the whole is cut off.
pub(crate) fn whole<'de, D: Deserializer<'de>, T: TryFrom<u64>>(from: D) -> Result<T, D::Error> {
    from.deserialize_any(Whole(PhantomData))
}

/// Degrees, to the nearest one, or `null`.
pub(crate) fn degrees<'de, D: Deserializer<'de>>(from: D) -> Result<Option<i32>, D::Error> {
    let number = Option::<f64>::deserialize(from)?;
    let rounded = |number: f64| {
        let fits = (f64::from(i32::MIN)..=f64::from(i32::MAX)).contains(&number);
        if fits {
            Ok(number.round() as i32)
        } else {
            Err(D::Error::invalid_value(Unexpected::Float(number), &"degrees"))
        }
    };
    number.map(rounded).transpose()
}

struct Whole<T>(PhantomData<T>);

impl<T: TryFrom<u64>> Visitor<'_> for Whole<T> {
    type Value = T;

    fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "a number from 0 on that fits {} bits", 8 * size_of::<T>())
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<T, E> {
        T::try_from(number).map_err(|_| E::invalid_value(Unexpected::Unsigned(number), &self))
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<T, E> {
        let positive = u64::try_from(number).map_err(|_| E::invalid_value(Unexpected::Signed(number), &self))?;
        self.visit_u64(positive)
    }

    fn visit_f64<E: Error>(self, number: f64) -> Result<T, E> {
        if (0.0..MOST).contains(&number) {
            self.visit_u64(number as u64)
        } else {
            Err(E::invalid_value(Unexpected::Float(number), &self))
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::stats::{Gpu, GpuSummary};

    fn summary(utilization: &str) -> Result<u32, String> {
        let text = format!(r#"{{"gpu_id":0,"name":"A","memory_usage_percent":1,"utilization_percent":{utilization}}}"#);
        serde_json::from_str::<GpuSummary>(&text).map(|gpu| gpu.utilization_percent).map_err(|error| error.to_string())
    }

    #[test]
    fn numbers_with_a_fraction_are_taken_and_cut() {
        assert_eq!(["40", "40.0", "89.6", "1e2"].map(|text| summary(text).unwrap()), [40, 40, 89, 100]);
    }

    #[test]
    fn what_is_no_number_from_0_on_is_refused_with_what_is_allowed() {
        for (wrong, said) in [("-1", "`-1`"), ("-0.5", "`-0.5`"), ("1e300", "`1e+300`"), ("4294967296", "`4294967296`")]
        {
            let error = summary(wrong).unwrap_err();
            assert!(error.contains(said) && error.contains("a number from 0 on that fits 32 bits"), "{error}");
        }
        for wrong in ["null", "\"40\"", "true"] {
            assert!(summary(wrong).unwrap_err().contains("a number from 0 on"), "{wrong}");
        }
    }

    #[test]
    fn a_gpu_with_fractions_everywhere_is_taken() {
        let text = r#"{"gpu_id":0,"name":"A","memory":{"total_mb":81559.0,"used_mb":1.5,"free_mb":2.0,"usage_percent":1},
            "utilization_percent":3.7,"temperature_c":40.6,"power":{"draw_w":1,"limit_w":null}}"#;
        let gpu: Gpu = serde_json::from_str(text).unwrap();
        let memory = (gpu.memory.total_mb, gpu.memory.used_mb, gpu.memory.free_mb);
        assert_eq!((memory, gpu.utilization_percent, gpu.temperature_c), ((81_559, 1, 2), 3, Some(41)));
        let cold = text.replace("40.6", "null");
        assert_eq!(serde_json::from_str::<Gpu>(&cold).unwrap().temperature_c, None);
        let absurd = text.replace("40.6", "1e20");
        assert!(serde_json::from_str::<Gpu>(&absurd).unwrap_err().to_string().contains("expected degrees"));
    }
}
