//! The choices among a few names that settings offer.

use gpupool_core::policy::{QueueOrder, Size};

use crate::value::{Named, name_of};

macro_rules! choice {
    ($(#[$doc:meta])* $type:ident { $($(#[$variant_doc:meta])* $variant:ident = $($name:literal)|+),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $type {
            $($(#[$variant_doc])* $variant),+
        }

        impl Named for $type {
            const NAMES: &'static [(&'static str, Self)] = &[$($(($name, Self::$variant)),+),+];
        }

        impl $type {
            /// Its name, as people write it.
            pub fn name(self) -> &'static str {
                name_of(&self)
            }
        }
    };
}

choice! {
    /// How much the agent tells in its log.
    LogLevel {
        /// Everything.
        Trace = "trace",
        /// What helps to find a mistake.
        Debug = "debug",
        /// What happens.
        Info = "info",
        /// What may be wrong.
        Warn = "warn" | "warning",
        /// What is wrong.
        Error = "error" | "critical" | "fatal",
        /// Nothing.
        Off = "off",
    }
}

choice! {
    /// How a line of the log is written.
    LogFormat {
        /// For people.
        Text = "text",
        /// For programs: one JSON object a line.
        Json = "json",
    }
}

choice! {
    /// How a client chooses among several endpoints.
    Balancing {
        /// The highest share of available GPUs.
        Availability = "availability",
        /// Each in turn.
        RoundRobin = "round_robin",
        /// In proportion to their GPUs.
        Weighted = "weighted",
    }
}

impl Named for QueueOrder {
    const NAMES: &'static [(&'static str, Self)] = &[("fifo", Self::Fifo), ("fair-share", Self::FairShare)];
}

impl Named for Size {
    const NAMES: &'static [(&'static str, Self)] =
        &[("host-only", Self::HostOnly), ("part", Self::Part), ("whole", Self::Whole), ("several", Self::Several)];
}
