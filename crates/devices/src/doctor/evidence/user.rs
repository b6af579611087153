//! Who is looking, and which groups there are.

use std::path::Path;

use crate::kernel_file;
use crate::told::Told;

/// The current user.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct User {
    /// Their number.
    pub uid: u32,
    /// The groups this process is in.
    pub gids: Vec<u32>,
    /// The groups of the machine.
    pub groups: Told<Vec<Group>>,
}

/// A group of the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// Its number.
    pub gid: u32,
    /// Its name.
    pub name: String,
    /// Whether it lists the current user; the process may be older than that.
    pub lists_user: bool,
}

impl User {
    pub(super) fn current(etc: &Path) -> Self {
        let uid = rustix::process::geteuid().as_raw();
        let mut gids = vec![rustix::process::getegid().as_raw()];
        gids.extend(rustix::process::getgroups().unwrap_or_default().iter().map(|gid| gid.as_raw()));
        gids.sort_unstable();
        gids.dedup();
        let name = kernel_file::text(&etc.join("passwd")).value().and_then(|text| user_name(text, uid));
        let groups = kernel_file::text(&etc.join("group"));
        Self { uid, gids, groups: groups.map(|text| parse_groups(&text, name.as_deref())) }
    }

    /// The group with this number, where the machine names it.
    pub(crate) fn group(&self, gid: u32) -> Option<&Group> {
        self.groups.value()?.iter().find(|group| group.gid == gid)
    }
}

fn user_name(passwd: &str, uid: u32) -> Option<String> {
    let of_line = |line: &str| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)?.parse() == Ok(uid)).then(|| name.to_owned())
    };
    passwd.lines().find_map(of_line)
}

fn parse_groups(text: &str, user: Option<&str>) -> Vec<Group> {
    let group = |line: &str| {
        let mut fields = line.split(':');
        let name = fields.next()?.to_owned();
        let gid = fields.nth(1)?.parse().ok()?;
        let mut members = fields.next().unwrap_or_default().split(',').map(str::trim);
        Some(Group { gid, name, lists_user: user.is_some_and(|user| members.any(|member| member == user)) })
    };
    text.lines().filter_map(group).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_read_with_whether_they_list_the_user() {
        assert_eq!(
            user_name("root:x:0:0::/root:/bin/sh\nada:x:1000:1000::/home/ada:/bin/sh", 1000).as_deref(),
            Some("ada")
        );
        let groups = parse_groups("video:x:44:ada,bob\nrender:x:110:bob\nbroken\nworse:x:y:z\n", Some("ada"));
        let seen: Vec<_> = groups.iter().map(|group| (group.name.as_str(), group.gid, group.lists_user)).collect();
        assert_eq!(seen, [("video", 44, true), ("render", 110, false)]);
    }
}
