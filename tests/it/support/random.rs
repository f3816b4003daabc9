//! Random numbers, repeatable by seed.

/// xorshift64*.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        // splitmix64: adjacent seeds give unrelated numbers, and none gives zero
        let mut mixed = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        Random((mixed ^ (mixed >> 31)) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// At least 0 and less than 1.
    pub fn part(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Both bounds are inclusive.
    pub fn within(&mut self, least: i64, most: i64) -> i64 {
        let span = most.abs_diff(least).saturating_add(1);
        least.wrapping_add_unsigned(self.next() % span)
    }

    pub fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.next() as usize % of.len()]
    }

    pub fn is(&mut self, probability: f64) -> bool {
        self.part() < probability
    }

    /// Seconds until the next event of a Poisson process with `rate` events per second.
    pub fn pause(&mut self, rate: f64) -> f64 {
        -(1.0 - self.part()).ln() / rate
    }
}
