//! What the starter tells its keeper on the command line. Environment, directory and standard streams come by
//! inheritance.

use std::ffi::{OsStr, OsString};
use std::os::fd::RawFd;

/// Which process group the job runs in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Placement {
    /// Its own.
    OwnGroup,
    /// That of the starter, whose number this is.
    GroupOfStarter(i32),
}

/// A keeper's orders.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Order {
    /// The file descriptor of the socket to the starter.
    pub(crate) link: RawFd,
    /// The starter's pid.
    pub(crate) starter: i32,
    pub(crate) placement: Placement,
    pub(crate) program: OsString,
    pub(crate) arguments: Vec<OsString>,
}

impl Order {
    /// The arguments after the hidden one.
    pub(crate) fn to_arguments(&self) -> Vec<OsString> {
        let group = match self.placement {
            Placement::OwnGroup => 0,
            Placement::GroupOfStarter(group) => group,
        };
        let numbers = [self.link, self.starter, group].map(|number| OsString::from(number.to_string()));
        numbers.into_iter().chain([self.program.clone()]).chain(self.arguments.iter().cloned()).collect()
    }

    /// Reads them back; `None` if they are not from us.
    pub(crate) fn parse(arguments: &[OsString]) -> Option<Self> {
        let [link, starter, group, program, arguments @ ..] = arguments else {
            return None;
        };
        let number = |text: &OsStr| text.to_str()?.parse::<i32>().ok().filter(|&number| number >= 0);
        let link = number(link).filter(|&link| link > 2)?;
        let placement = match number(group)? {
            0 => Placement::OwnGroup,
            group => Placement::GroupOfStarter(group),
        };
        let (program, arguments) = (program.clone(), arguments.to_vec());
        Some(Self { link, starter: number(starter)?, placement, program, arguments })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_survive_the_command_line_and_others_are_refused() {
        for placement in [Placement::OwnGroup, Placement::GroupOfStarter(77)] {
            let arguments = vec!["-c".into(), "exit 3".into()];
            let order = Order { link: 9, starter: 12, placement, program: "sh".into(), arguments };
            assert_eq!(Order::parse(&order.to_arguments()), Some(order));
        }
        for wrong in [&["9", "1"][..], &[], &["x", "1", "0", "sh"], &["1", "1", "0", "sh"], &["9", "-1", "0", "sh"]] {
            let wrong: Vec<OsString> = wrong.iter().map(OsString::from).collect();
            assert_eq!(Order::parse(&wrong), None, "{wrong:?}");
        }
    }
}
