//! Exits as people compare them: by reason, and since another look.

use crate::exits::Exits;

impl Exits {
    /// Each reason in words, and how often it was that.
    pub fn by_reason(&self) -> [(&'static str, u64); 8] {
        [
            ("PMU reads", self.pmu_reads),
            ("PMU writes", self.pmu_writes),
            ("port reads", self.port_reads),
            ("port writes", self.port_writes),
            ("memory reads", self.memory_reads),
            ("memory writes", self.memory_writes),
            ("signals", self.signals),
            ("others", self.others),
        ]
    }

    /// All of them.
    pub fn total(&self) -> u64 {
        self.by_reason().iter().map(|(_, count)| count).sum()
    }

    /// Those since then.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        Self {
            port_reads: self.port_reads.saturating_sub(before.port_reads),
            port_writes: self.port_writes.saturating_sub(before.port_writes),
            memory_reads: self.memory_reads.saturating_sub(before.memory_reads),
            memory_writes: self.memory_writes.saturating_sub(before.memory_writes),
            pmu_reads: self.pmu_reads.saturating_sub(before.pmu_reads),
            pmu_writes: self.pmu_writes.saturating_sub(before.pmu_writes),
            signals: self.signals.saturating_sub(before.signals),
            others: self.others.saturating_sub(before.others),
        }
    }
}
