"Numbers as tables, CSV files and pictures; no model is opened here."
