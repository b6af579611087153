//! What the error numbers mean that NVIDIA's driver reports (Xids), and which of them speak against a device.
//!
//! Most Xids are caused by a program and end with it. Some say that the device needs a reset, a reboot or a hand. A few
//! lie between: the driver dealt with the fault and wants a reset some time. A number this table does not have is a
//! warning: a device is taken out of use only for what is known to be its own fault.

/// What an Xid says about the device it names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum XidSeverity {
    /// A program did something wrong, or was ended; nothing speaks against the device.
    Application,
    /// People should know; the device goes on taking work.
    Warn,
    /// The device takes no new work until it was reset, or replaced.
    Unhealthy,
}

/// What one Xid means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct XidDescription {
    /// What it says about the device.
    pub severity: XidSeverity,
    pub meaning: &'static str,
    /// What a person can do about it; empty where there is nothing to do.
    pub remedy: &'static str,
}

/// What an Xid means.
pub(crate) fn describe_xid(xid: u32) -> XidDescription {
    let known = TABLE.binary_search_by_key(&xid, |row| row.0).ok().and_then(|place| TABLE.get(place));
    known.map_or(UNKNOWN, |&(_, severity, meaning, remedy)| XidDescription { severity, meaning, remedy })
}

const UNKNOWN: XidDescription = XidDescription {
    severity: XidSeverity::Warn,
    meaning: "an error gpupool does not know",
    remedy: "look it up in NVIDIA's catalogue of Xid errors",
};

const RESET: &str = "reset the GPU";
const REBOOT: &str = "reboot the node; if it comes back, have the GPU looked at";
const LOOK: &str = "watch whether it repeats";
const CABLING: &str = "reset the GPU; if it comes back, check links, switches and cabling";
const REPLACE: &str = "have the GPU replaced";

/// Number, severity, meaning, remedy; in the order of the numbers.
const TABLE: [(u32, XidSeverity, &str, &str); 49] = {
    use XidSeverity::{Application, Unhealthy, Warn};
    [
        (8, Application, "a program's work on the GPU took too long", ""),
        (13, Application, "a program made the compute or graphics engine fault", ""),
        (16, Warn, "the display engine hung", LOOK),
        (31, Application, "a program used GPU memory it does not have", ""),
        (32, Warn, "commands for the GPU arrived damaged", LOOK),
        (38, Warn, "the driver's firmware failed", "update the driver"),
        (43, Application, "a program's work was stopped after it had faulted", ""),
        (44, Warn, "the graphics engine faulted during a context switch", LOOK),
        (45, Application, "work was cleared away because its program ended", ""),
        (46, Unhealthy, "the GPU stopped working", RESET),
        (48, Unhealthy, "a memory error that could not be corrected", RESET),
        (54, Unhealthy, "the auxiliary power cable is not attached", "attach the power cable"),
        (56, Warn, "the display engine failed", LOOK),
        (61, Unhealthy, "a controller inside the GPU stopped at an unforeseen point", RESET),
        (62, Unhealthy, "a controller inside the GPU halted", RESET),
        (63, Warn, "a bad piece of memory will be replaced by a spare one", "reset the GPU when it is free"),
        (64, Unhealthy, "a bad piece of memory could not be put out of use", RESET),
        (65, Warn, "the video processor faulted", LOOK),
        (66, Application, "a program used the driver in a way it refuses", ""),
        (68, Application, "a program made the video decoder fault", ""),
        (69, Application, "a program used an engine in a way it does not know", ""),
        (72, Application, "a program made a copy engine fault", ""),
        (74, Unhealthy, "an error on an NVLink", CABLING),
        (78, Warn, "a virtual GPU could not be started", LOOK),
        (79, Unhealthy, "the GPU fell off the bus", REBOOT),
        (80, Warn, "damaged data on its way to the GPU", LOOK),
        (92, Warn, "many memory errors that were corrected", LOOK),
        (94, Warn, "a memory error that hit one program only", "reset the GPU when it is free"),
        (95, Unhealthy, "a memory error that may have hit every program", RESET),
        (109, Application, "a program did not make room for another in time", ""),
        (110, Unhealthy, "a security fault", REBOOT),
        (119, Unhealthy, "the GPU's system processor does not answer", RESET),
        (120, Unhealthy, "the GPU's system processor failed", RESET),
        (121, Warn, "an error on the link between chips was corrected", LOOK),
        (122, Warn, "a controller could not read the GPU's settings", LOOK),
        (123, Warn, "a controller could not write the GPU's settings", LOOK),
        (136, Unhealthy, "the GPU could not be trained to its link", RESET),
        (137, Application, "a program used the memory of another GPU in a way it may not", ""),
        (140, Unhealthy, "a memory error the GPU could not recover from", RESET),
        (143, Unhealthy, "the GPU could not be started", REBOOT),
        (144, Warn, "an NVLink reported trouble in its controller", LOOK),
        (145, Warn, "an NVLink reported trouble in a remote part", LOOK),
        (149, Warn, "an NVLink went down or could not come up", CABLING),
        (150, Warn, "an NVLink reported trouble between its ends", LOOK),
        (154, Warn, "the driver changed what it advises for this GPU", "read the advice in the kernel log"),
        (155, Warn, "an NVLink error that software found", LOOK),
        (156, Warn, "a part of the GPU was put out of use", "reset the GPU when it is free"),
        (157, Unhealthy, "a part of the GPU could not be put out of use", REPLACE),
        (158, Unhealthy, "the GPU ran into a deadly timeout", REBOOT),
    ]
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_order_so_that_every_row_is_found() {
        assert!(TABLE.is_sorted_by(|a, b| a.0 < b.0));
        for (xid, severity, ..) in TABLE {
            assert_eq!(describe_xid(xid).severity, severity, "{xid}");
        }
    }

    #[test]
    fn programs_faults_do_not_speak_against_a_device_and_its_own_do() {
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
