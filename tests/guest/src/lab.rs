//! Groups of steps on the lab's simulated host: one boot runs many commands, and each test checks the result of its
//! own.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::thread;
use std::time::Duration;

use guest_images::cache::Cache;
use guest_images::{Arch, Progress, Release, Suite};
use tally_lab::{Core, HostPmu, Scenario, cross, default_host};

use crate::host::{self, Host, Silicon};
use crate::{payload, program, suite};

/// Exit status and output of one step.
#[derive(Debug, Clone)]
pub struct StepOutput {
    pub status: i32,
    pub out: Vec<u8>,
    pub err: String,
}

impl StepOutput {
    /// Returns the standard output as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.out).into_owned()
    }

    /// Returns what the step with this name has printed.
    ///
    /// # Panics
    /// If it has failed.
    pub fn printed(&self, name: &str) -> String {
        assert_eq!(self.status, 0, "{name}: {}{}", self.text(), self.err);
        self.text()
    }
}

/// Shell functions for scripts on the host that must observe everything a guest does from some point on.
///
/// - `begin COMMAND...` starts a guest as process `$tally`, and stops it with SIGSTOP as soon as it has a vCPU thread,
///   `$vcpu`.
/// - `find_vcpu` sets `$vcpu` for the guest `$tally` without stopping it.
/// - `ended PROCESS` waits for a guest, and succeeds if the guest wrote 0 to the debug exit (status 1).
pub const PAUSED_GUESTS: &str = "\
find_vcpu() {
    until comm=$(grep -ls '^vcpu0' /proc/$tally/task/*/comm) || ! kill -0 $tally; do sleep 0.001; done
    vcpu=${comm%/comm} vcpu=${vcpu##*/}
}
begin() {
    \"$@\" & tally=$!
    find_vcpu
    kill -STOP $tally
}
ended() {
    wait $1
    [ $? = 1 ]
}
";

/// Shell functions for guests that are saved: `up NAME` waits for a VM, and `said FILE` for the word "ready" in its
/// output. `chain NAME SNAPSHOTS GAP ARGUMENTS...` runs a guest that is saved and restored again and again.
pub const SAVED_GUESTS: &str = "\
up() { until ./tally list 2>/dev/null | grep -q \" $1 \"; do sleep 0.02; done; }
said() { until grep -qs ready $1; do sleep 0.05; done; }
chain() {
    name=$1 snapshots=$2 gap=$3
    shift 3
    ./tally run --name $name \"$@\" >$name.said 2>$name.err </dev/null & vm=$!
    said $name.said
    for number in $(seq $snapshots); do
        sleep 0.15
        up $name
        ./tally snapshot $name $name.$number --stop || return
        wait $vm; stopped=$?
        [ $stopped = 125 ] || echo \"stopped: $stopped\"
        sleep $gap
        ./tally run --restore $name.$number >>$name.said 2>>$name.err </dev/null & vm=$!
        up $name
        rm -r $name.$number
    done
    wait $vm; status=$?
    cat $name.said
    grep -v 'the guest was saved; `tally run --restore` continues it' $name.err >&2
    return $status
}
";

/// Reserves a core for a test that starts the lab's programs itself. The core is released when the returned value is
/// dropped.
pub fn core() -> Core {
    const LIMIT: Duration = Duration::from_mins(5);
    Core::wait_for(thread::current().name().unwrap_or("a test"), LIMIT)
}

/// A group of named steps, and the configuration of the simulated host that they run on.
pub struct Steps {
    name: &'static str,
    arch: Arch,
    host: Host,
    changes: Vec<Change>,
    guest_programs: Vec<(String, Cow<'static, [u8]>)>,
    script: String,
    /// Commands after the last step, which must succeed.
    last: &'static str,
    /// The NMI watchdog holds a counter of the host's.
    is_stock: bool,
    /// The release of the default guest's kernel.
    guest: Release,
    names: Vec<String>,
}

/// Succeeds if there is one template, which can be used, and no guest has made another one.
const ONE_TEMPLATE: &str = "ls ~/.cache/tally/template-* >&2; [ \"$(echo $(ls ~/.cache/tally/template-*))\" = 'memory state.json' ] || exit\n";

type Change = Box<dyn FnOnce(Scenario) -> Scenario>;

/// Results of all steps, by name.
pub struct Results(BTreeMap<String, StepOutput>);

/// Results of a group of steps on each host. The group runs on a host when a test on that host needs it.
pub struct OnEachHost<T = Results> {
    amd: LazyLock<T>,
    intel: LazyLock<T>,
    /// On the hosts whose PMUs misbehave, in the order of [`Silicon::ALL`].
    silicon: [LazyLock<T>; Silicon::ALL.len()],
}

impl<T> OnEachHost<T> {
    /// Creates the results of a function, which is called on the thread of a test.
    pub const fn new(run: fn() -> T) -> Self {
        let silicon = [LazyLock::new(run), LazyLock::new(run), LazyLock::new(run), LazyLock::new(run)];
        Self { amd: LazyLock::new(run), intel: LazyLock::new(run), silicon }
    }
}

impl<T> Deref for OnEachHost<T> {
    type Target = T;

    /// Returns the results on the current test's host.
    fn deref(&self) -> &T {
        match (host::current(), host::silicon()) {
            (_, Some(silicon)) => &self.silicon[silicon as usize],
            (Host::Amd, None) => &self.amd,
            (Host::Intel, None) => &self.intel,
        }
    }
}

/// Adds a distribution's kernel to the host, with the modules that drive Tally's devices, laid out as its packages
/// install them: `NAME/boot/vmlinuz` and `NAME/lib/modules`. The step `install-NAME` unpacks it.
pub fn with_installed_kernel(steps: Steps, name: &'static str, suite: Suite) -> Steps {
    let release = Release { suite, arch: steps.arch };
    let cache = Cache::open().expect("there is a cache");
    let kernel = guest_images::kernel(&cache, release, &mut Progress::stderr("lab"))
        .unwrap_or_else(|error| panic!("{error}"));
    let modules = guest_images::modules::archive(&kernel.modules).unwrap_or_else(|error| panic!("{error}"));
    let archive = format!("{name}.modules");
    let unpack = format!(
        "mkdir -p {name}/boot && mv {name}.image {name}/boot/vmlinuz && cd {name} && cpio -i <../{archive}"
    );
    steps
        .configure_host(move |scenario| {
            scenario.file(kernel.image, &format!("{name}.image")).program(modules, &archive)
        })
        .step(&format!("install-{name}"), &unpack)
}

impl Results {
    pub fn of(&self, name: &str) -> &StepOutput {
        self.0.get(name).unwrap_or_else(|| panic!("there is no step `{name}`"))
    }
}

impl Steps {
    /// Creates a group on the x86-64 host of the test that runs. The host has `tally`, the program `typist`, the
    /// bare-metal test program as `payload`, and the default guest.
    pub fn new(name: &'static str) -> Self {
        Self::of(Arch::X86_64, name)
    }

    /// Creates a group on a RISC-V host, which has `tally` and the default guest.
    pub fn on_riscv(name: &'static str) -> Self {
        Self::of(Arch::Riscv64, name)
    }

    fn of(arch: Arch, name: &'static str) -> Self {
        let host = host::current();
        let silicon = host::silicon();
        let prefix = silicon.map(Silicon::name).or((host == Host::Intel).then_some("intel"));
        let name = prefix.map_or(name, |prefix| Box::leak(format!("{prefix}::{name}").into_boxed_str()));
        let changes = silicon.map(|silicon| Box::new(move |host| silicon.configure(host)) as Change);
        let (guest_programs, names) = (Vec::new(), Vec::new());
        Self {
            name,
            arch,
            host,
            changes: changes.into_iter().collect(),
            guest_programs,
            script: host::prelude().to_owned(),
            last: "",
            is_stock: false,
            guest: Release::of(arch),
            names,
        }
    }

    /// Leaves the host as its distribution has it: the NMI watchdog keeps its counter. Other groups have all counters.
    #[must_use]
    pub fn stock(self) -> Self {
        Self { is_stock: true, ..self }
    }

    /// Gives the default guest the host's kernel, which knows the same events by name.
    #[must_use]
    pub fn with_the_hosts_kernel(self) -> Self {
        Self { guest: default_host(self.arch), ..self }
    }

    /// Adds a program to the default guest, in the directory that its command starts in.
    #[must_use]
    pub fn in_guest(mut self, name: &str, program: impl Into<Cow<'static, [u8]>>) -> Self {
        self.guest_programs.push((name.to_owned(), program.into()));
        self
    }

    /// Changes the host's configuration.
    #[must_use]
    pub fn configure_host(mut self, change: impl FnOnce(Scenario) -> Scenario + 'static) -> Self {
        self.changes.push(Box::new(change));
        self
    }

    /// Copies a file of this machine into the directory that the steps run in.
    #[must_use]
    pub fn file(self, path: impl Into<PathBuf>, name: &'static str) -> Self {
        let path = path.into();
        self.configure_host(move |scenario| scenario.file(path, name))
    }

    /// Lets default guests start from a template, which the saved host has: it is made once for all groups with the
    /// same guest. Guests with other options have to boot (`--append`): a template of their own would take longer.
    #[must_use]
    pub fn from_template(mut self) -> Self {
        self.script.push_str(ONE_TEMPLATE);
        self.last = ONE_TEMPLATE;
        self.configure_host(|scenario| scenario.template([""; 0]))
    }

    /// Adds a step: commands that run in a shell of their own.
    #[must_use]
    pub fn step(mut self, name: &str, commands: &str) -> Self {
        writeln!(
            self.script,
            "echo 'step {name}' >&2\n({commands}) >$OUT/{name}.out 2>$OUT/{name}.err\necho $? >$OUT/{name}.status"
        )
        .expect("writing to a string cannot fail");
        self.names.push(name.to_owned());
        self
    }

    /// Adds a step that boots the bare-metal test program with `words` as its command line. The words are documented at
    /// [`guest_images::payloads::BARE_METAL`].
    #[must_use]
    pub fn bare_metal(self, name: &str, options: &str, words: &str) -> Self {
        self.step(name, &format!("./tally run --kernel payload {options} --append '{words}'"))
    }

    /// Adds steps that only tests of the second tier need, if that tier runs.
    #[must_use]
    pub fn second_tier(self, add: impl FnOnce(Self) -> Self) -> Self {
        if suite::runs_second_tier() { add(self) } else { self }
    }

    /// Raises the time limit of a slow group. Until a group's duration is known it is expected to take its whole limit,
    /// so a slow group is also among the first that get a core.
    #[must_use]
    pub fn long(self) -> Self {
        match self.host {
            Host::Amd => self.configure_host(|scenario| scenario.limit(Duration::from_mins(40))),
            Host::Intel => self,
        }
    }

    /// Waits for a core, boots the host, runs the steps, and returns their results.
    pub fn run(self) -> Results {
        let guest_programs: Vec<_> =
            self.guest_programs.iter().map(|(name, program)| (name.as_str(), program.as_ref())).collect();
        let folder = tempfile::tempdir().expect("temporary folders can be made");
        let mut progress = Progress::stderr("lab");
        let scenario = if self.is_stock { Scenario::new } else { Scenario::with_all_counters };
        let scenario = scenario(self.script + self.last).named(self.name).host(default_host(self.arch));
        let scenario = match self.arch {
            Arch::X86_64 => scenario
                .file(program("tally"), "tally")
                .file(program("typist"), "typist")
                .file(payload(), "payload"),
            Arch::Riscv64 => {
                let tally = cross::program("tally", &mut progress);
                scenario.file(tally.unwrap_or_else(|error| panic!("{error}")), "tally")
            }
        };
        let scenario = scenario
            .limit(Duration::from_mins(if self.host == Host::Intel { 90 } else { 20 }))
            .keep_output_in(folder.path())
            .guest_with(self.guest, &guest_programs, &mut progress)
            .unwrap_or_else(|error| panic!("the default guest: {error}"));
        // The Intel host is several times slower.
        let scenario = match self.host {
            Host::Amd => scenario,
            Host::Intel => scenario.pmu(HostPmu::INTEL),
        };
        let scenario = self.changes.into_iter().fold(scenario, |scenario, change| change(scenario));
        let outcome = scenario.run(&mut Progress::stderr("lab")).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(outcome.status, 0, "{}", String::from_utf8_lossy(&outcome.stderr));
        Results(self.names.iter().map(|name| (name.clone(), step_output(folder.path(), name))).collect())
    }
}

/// Reads what a step left in the output directory.
fn step_output(folder: &Path, name: &str) -> StepOutput {
    let read = |suffix: &str| {
        let path = folder.join(format!("{name}.{suffix}"));
        fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    };
    let text = |suffix: &str| String::from_utf8_lossy(&read(suffix)).into_owned();
    StepOutput {
        status: text("status").trim().parse().expect("a status is a number"),
        out: read("out"),
        err: text("err"),
    }
}
