//! Meaning of the error numbers of NVIDIA's driver (Xids), and which of them blame a device.
//!
//! Most Xids are caused by a program and end with it. Some mean that the device needs a reset, a reboot or repair. A
//! few lie between: the driver handled the fault and wants a reset later. An unknown number is only a warning: a device
//! is taken out of use only for a known fault of its own.

/// Severity of an Xid for its device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum XidSeverity {
    /// A program failed or was ended; the device is fine.
    Application,
    /// An operator should know, but the device still takes work.
    Warn,
    /// The device takes no new work until it is reset or replaced.
    Unhealthy,
}

/// Meaning of an Xid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct XidDescription {
    pub severity: XidSeverity,
    pub meaning: &'static str,
    /// Remedy; empty if there is nothing to do.
    pub remedy: &'static str,
}

/// Returns the meaning of an Xid.
pub(crate) fn describe_xid(xid: u32) -> XidDescription {
    let known = TABLE.binary_search_by_key(&xid, |row| row.0).ok().and_then(|place| TABLE.get(place));
    known.map_or(UNKNOWN, |&(_, severity, meaning, remedy)| XidDescription { severity, meaning, remedy })
}

const UNKNOWN: XidDescription = XidDescription {
    severity: XidSeverity::Warn,
    meaning: "an unknown error",
    remedy: "see NVIDIA's catalogue of Xid errors",
};

const RESET: &str = "reset the GPU";
const REBOOT: &str = "reboot the node; if it recurs, have the GPU checked";
const LOOK: &str = "watch for repeats";
const CABLING: &str = "reset the GPU; if it recurs, check links, switches and cabling";
const REPLACE: &str = "replace the GPU";

/// Number, severity, meaning and remedy, sorted by number.
const TABLE: [(u32, XidSeverity, &str, &str); 49] = {
    use XidSeverity::{Application, Unhealthy, Warn};
    [
        (8, Application, "a program's work on the GPU took too long", ""),
        (13, Application, "a program made the compute or graphics engine fault", ""),
        (16, Warn, "the display engine hung", LOOK),
        (31, Application, "a program accessed invalid GPU memory", ""),
        (32, Warn, "corrupted commands for the GPU", LOOK),
        (38, Warn, "the driver's firmware failed", "update the driver"),
        (43, Application, "a program's work was stopped after a fault", ""),
        (44, Warn, "the graphics engine faulted during a context switch", LOOK),
        (45, Application, "work was removed because its program ended", ""),
        (46, Unhealthy, "the GPU stopped working", RESET),
        (48, Unhealthy, "an uncorrectable memory error", RESET),
        (54, Unhealthy, "the auxiliary power cable is not attached", "attach the power cable"),
        (56, Warn, "the display engine failed", LOOK),
        (61, Unhealthy, "a controller inside the GPU stopped unexpectedly", RESET),
        (62, Unhealthy, "a controller inside the GPU halted", RESET),
        (63, Warn, "bad memory will be replaced at the next reset", "reset the GPU when it is free"),
        (64, Unhealthy, "bad memory could not be retired", RESET),
        (65, Warn, "the video processor faulted", LOOK),
        (66, Application, "a program made an invalid driver call", ""),
        (68, Application, "a program made the video decoder fault", ""),
        (69, Application, "a program sent an invalid command to an engine", ""),
        (72, Application, "a program made a copy engine fault", ""),
        (74, Unhealthy, "an error on an NVLink", CABLING),
        (78, Warn, "a virtual GPU could not be started", LOOK),
        (79, Unhealthy, "the GPU fell off the bus", REBOOT),
        (80, Warn, "corrupted data sent to the GPU", LOOK),
        (92, Warn, "a high rate of corrected memory errors", LOOK),
        (94, Warn, "a memory error that affected only one program", "reset the GPU when it is free"),
        (95, Unhealthy, "a memory error that may have affected every program", RESET),
        (109, Application, "a program's context switch timed out", ""),
        (110, Unhealthy, "a security fault", REBOOT),
        (119, Unhealthy, "the GPU's system processor does not answer", RESET),
        (120, Unhealthy, "the GPU's system processor failed", RESET),
        (121, Warn, "an error on the link between chips was corrected", LOOK),
        (122, Warn, "a controller could not read the GPU's settings", LOOK),
        (123, Warn, "a controller could not write the GPU's settings", LOOK),
        (136, Unhealthy, "the GPU could not be trained to its link", RESET),
        (137, Application, "a program made an invalid access to another GPU's memory", ""),
        (140, Unhealthy, "a memory error the GPU could not recover from", RESET),
        (143, Unhealthy, "the GPU could not be started", REBOOT),
        (144, Warn, "an NVLink reported an error in its controller", LOOK),
        (145, Warn, "an NVLink reported an error at its remote end", LOOK),
        (149, Warn, "an NVLink went down or could not come up", CABLING),
        (150, Warn, "an NVLink reported an error between its ends", LOOK),
        (154, Warn, "the driver changed its advice for this GPU", "read the advice in the kernel log"),
        (155, Warn, "an NVLink error detected by software", LOOK),
        (156, Warn, "a resource of the GPU was retired", "reset the GPU when it is free"),
        (157, Unhealthy, "a resource of the GPU could not be retired", REPLACE),
        (158, Unhealthy, "the GPU had a fatal timeout", REBOOT),
    ]
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_sorted_so_that_every_row_is_found() {
        assert!(TABLE.is_sorted_by(|a, b| a.0 < b.0));
        for (xid, severity, ..) in TABLE {
            assert_eq!(describe_xid(xid).severity, severity, "{xid}");
        }
    }

    #[test]
    fn only_faults_of_the_device_itself_make_it_unhealthy() {
        for xid in [13, 31, 43, 45, 68, 109] {
            assert_eq!(describe_xid(xid).severity, XidSeverity::Application, "{xid}");
        }
        for xid in [48, 64, 79, 95, 119] {
            assert_eq!(describe_xid(xid).severity, XidSeverity::Unhealthy, "{xid}");
        }
        for xid in [63, 94, 0, 9999] {
            assert_eq!(describe_xid(xid).severity, XidSeverity::Warn, "{xid}");
        }
    }
}
