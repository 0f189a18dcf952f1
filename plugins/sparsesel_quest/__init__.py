"""Quest: the pages of keys that could hold the highest scores, judged by their channel-wise bounds."""
