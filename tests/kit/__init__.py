"""What tests share: calls, strategies, fakes, recorded sweeps, an emulator; imported as `kit.<subject>`."""
