//! One setting as data, and the macro by which each is declared once.
//!
//! From one line of [`crate::settings`] come the field of the configuration, its key in the file, its variables and flag,
//! what is allowed, its default, what documentation and `config show` say of it, and whether SIGHUP can change it.

use std::path::PathBuf;

use serde_json::Value as Json;

/// Where the machine's own agent keeps its state.
pub(crate) const SYSTEM_STATE: &str = "/var/lib/gpupool";

/// What defaults depend on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    /// Whether the administrator runs it.
    pub root: bool,
    /// The machine's name.
    pub host_name: String,
    /// Where this user's programs keep their state.
    pub state_home: Option<PathBuf>,
}

impl Machine {
    /// Where the agent keeps its state unless it is told.
    pub fn state_dir(&self) -> PathBuf {
        match &self.state_home {
            Some(home) if !self.root => home.join("gpupool"),
            _ => PathBuf::from(SYSTEM_STATE),
        }
    }
}

/// One setting: what it is called, where it can be set, what it may be.
#[derive(Debug)]
pub struct Setting {
    /// Section and key in the file: `server.port`.
    pub key: &'static str,
    /// The variables it is read from, the first that is set wins.
    pub env: &'static [&'static str],
    /// The flag of the command line.
    pub flag: Option<&'static str>,
    /// Whether a running agent takes a change of it on SIGHUP.
    pub live: bool,
    /// Whether it is never shown.
    pub secret: bool,
    doc: &'static str,
    allowed: fn() -> String,
    default: fn(&Machine) -> Json,
}

impl Setting {
    /// What it means.
    pub fn meaning(&self) -> &'static str {
        self.doc.trim()
    }

    /// What it may be, in words.
    pub fn allowed(&self) -> String {
        (self.allowed)()
    }

    /// Its default on `machine`, as it is shown.
    pub fn default_on(&self, machine: &Machine) -> Json {
        (self.default)(machine)
    }

    /// The section of the file it stands in.
    pub fn section(&self) -> &'static str {
        self.key.split_once('.').map_or(self.key, |(section, _)| section)
    }

    /// Its key within the section.
    pub fn name(&self) -> &'static str {
        self.key.split_once('.').map_or(self.key, |(_, name)| name)
    }

    /// Only the macro makes one.
    #[expect(clippy::too_many_arguments, reason = "a row of the table; only the macro below writes it")]
    pub(crate) const fn row(
        key: &'static str,
        env: &'static [&'static str],
        flag: Option<&'static str>,
        live: bool,
        secret: bool,
        doc: &'static str,
        allowed: fn() -> String,
        default: fn(&Machine) -> Json,
    ) -> Self {
        Self { key, env, flag, live, secret, doc, allowed, default }
    }
}

/// Declares sections of settings. A row reads `name: Type = default, bounds => env "A" "ALIAS" flag "--x" [live];`.
macro_rules! settings {
    ($machine:ident; $(
        $(#[doc = $section_doc:literal])+
        $section:ident: $Section:ident {
            $(
                $(#[doc = $doc:literal])+
                $field:ident: $type:ty = $default:expr, $bounds:expr
                    => $(env $($env:literal)+)? $(flag $flag:literal)? $([$live:ident])?;
            )+
        }
    )+) => {
        $(
            $(#[doc = $section_doc])+
            #[derive(Debug, Clone, PartialEq)]
            pub struct $Section {
                $($(#[doc = $doc])+ pub $field: $type),+
            }

            impl $Section {
                fn rows() -> Vec<&'static Setting> {
                    vec![$(Self::$field()),+]
                }

                $(
                    fn $field() -> &'static Setting {
                        const ROW: &Setting = &Setting::row(
                            concat!(stringify!($section), ".", stringify!($field)),
                            &[$($($env),+)?],
                            settings!(@flag $($flag)?),
                            settings!(@live $($live)?),
                            <$type as Value>::SECRET,
                            concat!($($doc),+),
                            || <$type as Value>::allowed(&$bounds),
                            |machine| Value::shown(&$Section::defaults_of(machine).$field),
                        );
                        ROW
                    }
                )+

                fn defaults_of($machine: &Machine) -> Self {
                    let _ = $machine;
                    Self { $($field: $default),+ }
                }

                fn resolve(from: &mut Resolver<'_>) -> Self {
                    let defaults = Self::defaults_of(from.machine());
                    Self { $($field: from.pick(Self::$field(), &$bounds, defaults.$field)),+ }
                }
            }
        )+

        /// Everything that can be set, section by section.
        #[derive(Debug, Clone, PartialEq)]
        pub struct Config {
            $($(#[doc = $section_doc])+ pub $section: $Section,)+
            /// Policies, quotas and the order of the queue, as the pool takes them.
            pub policies: Policies,
        }

        impl Config {
            pub(crate) fn resolve(from: &mut Resolver<'_>) -> Self {
                let mut config = Self { $($section: $Section::resolve(from),)+ policies: Policies::default() };
                config.policies = crate::policies::read(from, config.queue.order, config.quota.period);
                config
            }
        }

        /// Every setting there is, in the order of the sections.
        pub fn all_settings() -> &'static [&'static Setting] {
            static ALL: LazyLock<Vec<&'static Setting>> =
                LazyLock::new(|| [$($Section::rows()),+].into_iter().flatten().collect());
            &ALL
        }

        /// Every section of settings and what it is about.
        pub const SECTIONS: &[(&str, &str)] = &[$((stringify!($section), concat!($($section_doc),+))),+];
    };
    (@flag) => { None };
    (@flag $flag:literal) => { Some($flag) };
    (@live) => { false };
    (@live live) => { true };
}

pub(crate) use settings;
