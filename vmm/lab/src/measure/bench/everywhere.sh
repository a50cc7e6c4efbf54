# Runs ./measure-LIMIT on this host and in guests, and prints the output of each.

tracepoints=kvm:kvm_hypercall,kvm:kvm_exit,kvm:kvm_userspace_exit,raw_syscalls:sys_enter
kernel=/proc/sys/kernel
percent=$(cat $kernel/perf_cpu_time_max_percent) rate=$(cat $kernel/perf_event_max_sample_rate)
trap 'echo 25 >$kernel/perf_cpu_time_max_percent; echo $rate >$kernel/perf_event_max_sample_rate
    echo $percent >$kernel/perf_cpu_time_max_percent' EXIT

fail() {
    echo "$1:" >&2
    cat printed complaints >&2
    exit 1
}

# Sets the host's limit to that of the guests, as the host takes the samples for them.
limit() {
    sh ./measure-$1 limit
}

# QEMU's guest prints the status of its command on the console.
succeeded() {
    grep -q '^row ' printed && ! grep -q '^tally: status [1-9]' printed
}

# measured NAME COMMAND...
measured() {
    name=$1
    shift
    echo "measuring $name" >&2
    "$@" >printed 2>complaints </dev/null && succeeded || fail $name
    mv printed $name
}

# counted NAME COMMAND...
counted() {
    name=$1
    shift
    echo "measuring $name" >&2
    "$@" >printed 2>complaints </dev/null &
    until thread=$(grep -lE '^(vcpu0|CPU 0/KVM)' /proc/[0-9]*/task/*/comm 2>/dev/null); do
        kill -0 $! || fail $name
        sleep 0.01
    done
    thread=${thread%/comm}
    perf record -q -o data -e "{$tracepoints}:S" -t ${thread##*/} 2>refused
    wait $! && succeeded || fail $name
    perf script -i data --ns -F time,event,period,trace >$name 2>refused || { cat refused >&2; exit 1; }
}

# mediated COMMAND...: runs a command with KVM's mediated vPMU, which is a parameter of KVM's module.
mediated() {
    load_kvm enable_mediated_pmu=1 && grep -q Y /sys/module/kvm_amd/parameters/enable_mediated_pmu || return
    "$@"
    status=$?
    load_kvm && return $status
}

# The module is still in use for a moment after the last guest has ended.
load_kvm() {
    tries=0
    until rmmod kvm_amd 2>/dev/null || [ $((tries += 1)) -gt 50 ]; do sleep 0.05; done
    [ $tries -le 50 ] && insmod /lib/modules/kvm_amd.ko "$@"
}

# Prints all results. This is done last, as the time that output takes depends on its reader. It is done with dd, as cat
# splices, and spliced data may be lost when the machine ends.
results() {
    for file in *.times *.counts; do
        [ -f $file ] || continue
        echo begin $file
        dd if=$file bs=64k 2>/dev/null
        echo end of this
    done
}

