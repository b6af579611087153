//! Families of metrics written one after the other, and the two text forms they are asked for in.

use std::fmt;

use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;

use super::distribution::Distribution;

/// What is written to. A family without lines is still named, so that what can be told is known beforehand.
pub(super) struct Page<'a>(pub DescriptorEncoder<'a>);

impl Page<'_> {
    fn family(&mut self, name: &'static str, help: &str, kind: MetricType) -> Result<MetricEncoder<'_>, fmt::Error> {
        self.0.encode_descriptor(name, help, None, kind)
    }

    pub fn gauges<L: EncodeLabelSet>(
        &mut self,
        name: &'static str,
        help: &str,
        lines: impl IntoIterator<Item = (L, f64)>,
    ) -> fmt::Result {
        let mut family = self.family(name, help, MetricType::Gauge)?;
        lines.into_iter().try_for_each(|(labels, value)| family.encode_family(&labels)?.encode_gauge(&value))
    }

    pub fn gauge(&mut self, name: &'static str, help: &str, value: Option<f64>) -> fmt::Result {
        let mut family = self.family(name, help, MetricType::Gauge)?;
        value.map_or(Ok(()), |value| family.encode_gauge(&value))
    }

    pub fn counters<L: EncodeLabelSet>(
        &mut self,
        name: &'static str,
        help: &str,
        lines: impl IntoIterator<Item = (L, u64)>,
    ) -> fmt::Result {
        let mut family = self.family(name, help, MetricType::Counter)?;
        lines.into_iter().try_for_each(|(labels, value)| {
            family.encode_family(&labels)?.encode_counter::<NoLabelSet, _, f64>(&value, None)
        })
    }

    pub fn counter(&mut self, name: &'static str, help: &str, value: Option<f64>) -> fmt::Result {
        let mut family = self.family(name, help, MetricType::Counter)?;
        value.map_or(Ok(()), |value| family.encode_counter::<NoLabelSet, _, f64>(&value, None))
    }

    pub fn distributions<'d, L: EncodeLabelSet>(
        &mut self,
        name: &'static str,
        help: &str,
        lines: impl IntoIterator<Item = (L, &'d Distribution)>,
    ) -> fmt::Result {
        let mut family = self.family(name, help, MetricType::Histogram)?;
        lines.into_iter().try_for_each(|(labels, values)| values.encode(&mut family.encode_family(&labels)?))
    }

    pub fn distribution(&mut self, name: &'static str, help: &str, values: &Distribution) -> fmt::Result {
        values.encode(&mut self.family(name, help, MetricType::Histogram)?)
    }
}

/// How metrics are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// OpenMetrics 1.0, which Prometheus asks for.
    OpenMetrics,
    /// The older text form of Prometheus.
    Plain,
}

impl Form {
    /// What fits the `Accept` header of a request.
    pub fn accepted(accept: &str) -> Self {
        if accept.contains("application/openmetrics-text") { Self::OpenMetrics } else { Self::Plain }
    }

    /// Its media type.
    pub const fn media_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Plain => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// The older form of a text of OpenMetrics: there a counter's family is named as its lines are.
pub(super) fn plain(text: &str) -> String {
    let mut plain = String::with_capacity(text.len() + 512);
    let mut help: Option<(&str, &str)> = None;
    for line in text.lines() {
        if let Some((name, words)) = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' ')) {
            help = Some((name, words));
            continue;
        }
        if line == "# EOF" {
            continue;
        }
        match (help.take(), line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' '))) {
            (Some((name, words)), Some((_, kind))) => {
                let suffix = if kind == "counter" { "_total" } else { "" };
                plain.push_str(&format!("# HELP {name}{suffix} {words}\n# TYPE {name}{suffix} {kind}\n"));
            }
            _ => {
                plain.push_str(line);
                plain.push('\n');
            }
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_older_form_names_counters_as_their_lines_and_has_no_end_mark() {
        let text = "# HELP a Of a.\n# TYPE a counter\na_total 1\n# HELP b Of b.\n# TYPE b gauge\nb 2\n# EOF\n";
        let wanted = "# HELP a_total Of a.\n# TYPE a_total counter\na_total 1\n# HELP b Of b.\n# TYPE b gauge\nb 2\n";
        assert_eq!(plain(text), wanted);
    }
}
