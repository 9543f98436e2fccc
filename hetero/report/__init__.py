"""What a run tells about itself: plans, statistics, timelines."""
