//! stub
/// x
pub struct Bundle;
/// x
pub struct Redact;
/// x
pub struct Wish;
