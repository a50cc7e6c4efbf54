//! Who may count a guest's kernel on this host: `kernel.perf_event_paranoid`, and the capabilities that it does not
//! bind.

use std::{env, fs};

/// The setting.
pub const PARANOID: &str = "kernel.perf_event_paranoid";

/// What a user needs to count a guest's kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Needed {
    /// Everybody may.
    Nothing,
    /// `CAP_PERFMON`; before Linux 5.8, `CAP_SYS_ADMIN`.
    Perfmon,
    /// `CAP_SYS_ADMIN`: Debian's and Ubuntu's kernels ask for it above 2, whatever is counted. Other kernels know no
    /// values above 2, but what helps here helps there, too.
    SysAdmin,
}

/// The capabilities of a process that matter to perf.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rights {
    /// It has `CAP_PERFMON`.
    pub perfmon: bool,
    /// It has `CAP_SYS_ADMIN`, which includes the other one.
    pub sys_admin: bool,
}

/// Returns the value of `kernel.perf_event_paranoid`, if this kernel has perf events.
pub fn paranoid() -> Option<i32> {
    fs::read_to_string("/proc/sys/kernel/perf_event_paranoid").ok()?.trim().parse().ok()
}

impl Needed {
    /// Returns what is needed at this value of `kernel.perf_event_paranoid`.
    pub fn at(paranoid: i32) -> Self {
        match paranoid {
            ..2 => Self::Nothing,
            2 => Self::Perfmon,
            3.. => Self::SysAdmin,
        }
    }

    /// Returns the name of the capability, if one is needed.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nothing => "",
            Self::Perfmon => "CAP_PERFMON",
            Self::SysAdmin => "CAP_SYS_ADMIN",
        }
    }

    /// Says what those may not do who lack the capability.
    pub fn refusal(self) -> &'static str {
        match self {
            Self::Nothing => "which forbids nothing",
            Self::Perfmon => "which forbids counting a guest's kernel",
            Self::SysAdmin => "at which Debian's and Ubuntu's kernels let only administrators count",
        }
    }

    /// Returns what helps those who lack the capability, with commands between backticks. No capability is advised that
    /// would make the user an administrator.
    pub fn remedy(self) -> String {
        const ALLOW: &str = "`sudo sysctl kernel.perf_event_paranoid=1` lets everybody";
        match self {
            Self::Perfmon => {
                let program =
                    env::current_exe().map_or_else(|_| "tally".into(), |path| path.display().to_string());
                format!("{ALLOW}, `sudo setcap cap_perfmon+ep {program}` this program")
            }
            Self::Nothing | Self::SysAdmin => ALLOW.to_owned(),
        }
    }
}

impl Rights {
    /// Returns the rights of this process.
    pub fn of_this_process() -> Self {
        let read = |file| fs::read_to_string(file).unwrap_or_default();
        if is_whole(&read("/proc/self/uid_map")) {
            Self::in_status(&read("/proc/self/status"))
        } else {
            // In a user namespace of its own, it has the capabilities there only.
            Self { perfmon: false, sys_admin: false }
        }
    }

    /// Returns the rights in `/proc/PID/status`. The numbers are those of `linux/capability.h`.
    fn in_status(status: &str) -> Self {
        const SYS_ADMIN: u32 = 21;
        const PERFMON: u32 = 38;
        let set = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
        let set = set.and_then(|set| u64::from_str_radix(set.trim(), 16).ok()).unwrap_or(0);
        let has = |bit: u32| set & 1_u64 << bit != 0;
        Self { perfmon: has(PERFMON), sys_admin: has(SYS_ADMIN) }
    }

    /// Returns whether they are what is needed.
    pub fn suffice_for(self, needed: Needed) -> bool {
        match needed {
            Needed::Nothing => true,
            Needed::Perfmon => self.perfmon || self.sys_admin,
            Needed::SysAdmin => self.sys_admin,
        }
    }
}

/// Returns whether a map of user ids (`/proc/PID/uid_map`) is that of the first user namespace, which has all ids.
fn is_whole(map: &str) -> bool {
    map.split_whitespace().eq(["0", "0", "4294967295"])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_in_a_user_namespace_are_no_rights_on_the_host() {
        assert!(is_whole("         0          0 4294967295\n"));
        assert!(!is_whole("         0     100000      65536\n"));
    }

    #[test]
    fn a_capability_is_found_by_its_bit() {
        let rights = |set: &str| Rights::in_status(&format!("CapPrm:\t000001ffffffffff\n{set}\n"));
        assert_eq!(rights("CapEff:\t0000004000000000"), Rights { perfmon: true, sys_admin: false });
        assert_eq!(rights("CapEff:\t0000000000200000"), Rights { perfmon: false, sys_admin: true });
        assert_eq!(rights("CapEff:\t0000000000000400"), Rights { perfmon: false, sys_admin: false });
    }

    #[test]
    fn the_capability_helps_only_where_it_is_enough() {
        let perfmon = Rights { perfmon: true, sys_admin: false };
        let at = [-1, 1, 2, 3, 4].map(|level| perfmon.suffice_for(Needed::at(level)));
        assert_eq!(at, [true, true, true, false, false]);
        let advised = [2, 3, 4].map(|level| Needed::at(level).remedy().contains("setcap"));
        assert_eq!(advised, [true, false, false]);
    }
}
